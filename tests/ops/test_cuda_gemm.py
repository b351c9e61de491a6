"""The CUDA matrix products, all weight formats through one set of cases, against fp64."""

import contextlib
from typing import Any

import pytest
import torch
from support import reference
from support.emulator import Emulator
from support.helpers import GEMM_FUSIONS, Guarded, assert_bitwise, assert_rounded, device_fixture, gemm_options
from support.linear_formats import FORMATS, Linear
from support.placement import EmulatedDevice
from torch import Tensor

from fastinfer import ops

device = device_fixture("cuda", "emulated")

DTYPES = [torch.bfloat16, torch.float16]


def assert_exact(linear: Linear, x: Tensor, slack: float = 1e-5, **options: Any) -> None:
    """fp32 arithmetic on the exact weight, rounded once."""
    out = linear.run(x, **options)
    assert out.dtype == x.dtype
    assert_rounded(out, reference.gemm(x, linear.dense, **options), slack)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    ("tokens", "out_features", "in_features"),
    [(1, 17, 32), (7, 130, 608), (9, 96, 256), (16, 1, 64), (17, 33, 96), (33, 140, 160), (64, 16, 64)],
)
def test_up_to_64_tokens_round_the_result_only(
    tokens: int, out_features: int, in_features: int, form: str, dtype: torch.dtype, device: str
) -> None:
    x = torch.randn(tokens, in_features, device=device).to(dtype)
    assert_exact(Linear(form, out_features, in_features, dtype, device), x)


def assert_wide(linear: Linear, x: Tensor, slack: float = 1e-5, **options: Any) -> None:
    """Weights are rounded to 16 bits, the result once more."""
    assert_rounded(linear.run(x, **options), reference.gemm(x, linear.rounded, **options), slack)


# Tiles of 128 tokens, then, for outputs enough, of 256, which are the last two cases'.
WIDE_SHAPES = [(65, 140, 96), (127, 1, 32), (128, 129, 64), (129, 40, 224), (257, 96, 160), (257, 300, 96)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("tokens", "out_features", "in_features"), WIDE_SHAPES)
def test_more_tokens_round_the_weight_too(
    tokens: int, out_features: int, in_features: int, form: str, dtype: torch.dtype, device: str
) -> None:
    x = torch.randn(tokens, in_features, device=device).to(dtype)
    assert_wide(Linear(form, out_features, in_features, dtype, device), x)


@pytest.mark.parametrize("form", FORMATS)
def test_more_tokens_are_as_good_as_a_dequantised_weight(form: str, device: str) -> None:
    x = torch.randn(150, 224, device=device).bfloat16()
    linear = Linear(form, 40, 224, torch.bfloat16, device)
    expected = reference.gemm(x, linear.dense)
    low_precision = x @ linear.dense.bfloat16().T
    error, allowed = ((out.double() - expected).square().mean().sqrt() for out in (linear.run(x), low_precision))
    assert error <= 2 * allowed


@pytest.mark.parametrize("in_features", [8, 72, 136])
def test_dense_inputs_need_no_multiple_of_32(in_features: int, device: str) -> None:
    for tokens in (3, 70):
        x = torch.randn(tokens, in_features, device=device).half()
        assert_exact(Linear("dense", 33, in_features, torch.float16, device), x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fusion", GEMM_FUSIONS)
def test_fusions(fusion: str, dtype: torch.dtype, device: str) -> None:
    """Formats and vector dtypes take turns. A fused norm rounds x * norm_weight, and gate times up has both errors."""
    eps = torch.finfo(dtype).eps
    forms = [("int4 min", 3, torch.float32), ("dense", 12, dtype), ("int8", 20, dtype), ("table", 5, torch.float32)]
    for form, tokens, vector_dtype in forms:
        x = torch.randn(tokens, 160, device=device).to(dtype)
        slack = (2 * eps if "norm" in fusion else 1e-5) * (4 if "lu" in fusion else 1)
        assert_exact(Linear(form, 160, 160, dtype, device), x, slack, **gemm_options(fusion, x, 160, vector_dtype))


@pytest.mark.parametrize("fusion", GEMM_FUSIONS)
def test_fusions_with_more_tokens(fusion: str, device: str) -> None:
    """A norm comes before, as a kernel of its own, and rounds what the product multiplies."""
    for form, tokens, dtype in [("int4 min", 70, torch.float16), ("dense", 140, torch.bfloat16)]:
        x = torch.randn(tokens, 96, device=device).to(dtype)
        slack = (2 * torch.finfo(dtype).eps if "norm" in fusion else 1e-5) * (4 if "lu" in fusion else 1)
        assert_wide(Linear(form, 160, 96, dtype, device), x, slack, **gemm_options(fusion, x, 160, torch.float32))


@pytest.mark.parametrize("form", ["int4 min", "int8"])
@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("group", [32, 64, 96, 192, 576])
def test_groups(group: int, scale_dtype: torch.dtype, form: str, device: str) -> None:
    """96 divides no chunk of a pipeline: a chunk's first and last group are cut."""
    for tokens in (2, 40):
        x = torch.randn(tokens, 576, device=device).half()
        assert_exact(Linear(form, 49, 576, torch.float16, device, group, scale_dtype=scale_dtype), x)
    x = torch.randn(67, 576, device=device).half()
    assert_wide(Linear(form, 49, 576, torch.float16, device, group, scale_dtype=scale_dtype), x)


@pytest.mark.parametrize("form", [form for form in FORMATS if form != "dense"])
@pytest.mark.parametrize(
    ("group", "in_features"), [(64, 320), (128, 128), (128, 640), (256, 768), (384, 768), (640, 640)]
)
def test_groups_that_have_kernels_of_their_own(group: int, in_features: int, form: str, device: str) -> None:
    """Multiples of 64 or 128 inputs with fp16 scales; chunks that end early, and groups that chunks cut."""
    for tokens, dtype in ((3, torch.half), (13, torch.bfloat16), (30, torch.half), (50, torch.bfloat16)):
        x = torch.randn(tokens, in_features, device=device).to(dtype)
        linear = Linear(form, 49, in_features, dtype, device, group)
        assert_exact(linear, x)
        assert_exact(linear, x, 2 * torch.finfo(dtype).eps, **gemm_options("norm", x, 49, torch.float32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "out_features", "in_features"), [(33, 49, 1408), (64, 760, 1408), (50, 140, 512)])
def test_minimums_of_many_chunks(
    tokens: int, out_features: int, in_features: int, dtype: torch.dtype, device: str
) -> None:
    """More than 32 tokens add minimums in batches of four chunks: whole units and cut ones, with and without a rest.

    Activations whose mean is not zero make the minimums' part of the sums large.
    """
    x = (torch.randn(tokens, in_features, device=device) + 1).to(dtype)
    assert_exact(Linear("int4 min", out_features, in_features, dtype, device, 128), x)


@pytest.mark.parametrize("fusion", ["plain", "norm+bias+residual", "norm+silu"])
@pytest.mark.parametrize("form", ["int4", "dense"])
def test_units_that_are_cut(form: str, fusion: str, device: str) -> None:
    """Long inputs and few outputs are summed by several blocks: in one order, whatever the batch within its tile."""
    x = torch.randn(7, 2048, device=device).bfloat16()
    linear = Linear(form, 64, 2048, torch.bfloat16, device, 128)
    options = gemm_options(fusion, x, 64, torch.float32)
    assert_exact(linear, x, 6e-2 if "silu" in fusion else 2e-2 if "norm" in fusion else 1e-5, **options)
    out = linear.run(x, **options)
    assert_bitwise(linear.run(x, **options), out)
    first = options | ({"residual": options["residual"][:2]} if "residual" in options else {})
    assert_bitwise(linear.run(x[:2], **first), out[:2])


@pytest.mark.parametrize("form", ["int4", "dense"])
@pytest.mark.parametrize(
    ("tokens", "out_features", "in_features"),
    [
        (100, 100, 1280),
        (70, 1000, 1536),
        (150, 100, 4160),
        pytest.param(130, 800, 1280, marks=pytest.mark.repeats),
        pytest.param(70, 1600, 1536, marks=pytest.mark.repeats),
    ],
)
def test_wide_units_that_are_cut(tokens: int, out_features: int, in_features: int, form: str, device: str) -> None:
    """On six multiprocessors one unit, or six or twelve whole ones before others, in tiles of 128 and of 256 tokens."""
    x = torch.randn(tokens, in_features, device=device).half()
    linear = Linear(form, out_features, in_features, torch.float16, device)
    options = gemm_options("bias+residual", x, out_features, torch.float32)
    assert_wide(linear, x, **options)
    assert_bitwise(linear.run(x, **options), linear.run(x, **options))


def test_products_share_their_counters(device: str) -> None:
    """Units that are cut into other numbers of pieces, one product after the other."""
    x = torch.randn(3, 2048, device=device).bfloat16()
    products = [
        (Linear("int4", n, k, torch.bfloat16, device, 128), k) for n, k in ((64, 2048), (300, 768), (130, 1536))
    ]
    for _ in range(2):
        for linear, k in products:
            assert_exact(linear, x[:, :k].contiguous())


@pytest.mark.parametrize("tokens", [3, 20, 70])
@pytest.mark.parametrize("form", FORMATS)
def test_constant_weights_change_nothing(form: str, tokens: int, device: str, request: pytest.FixtureRequest) -> None:
    x = torch.randn(tokens, 608, device=device).bfloat16()
    linear = Linear(form, 140, 608, torch.bfloat16, device)
    options = gemm_options("norm+bias", x, 140, torch.float32)
    expected = linear.run(x, **options)
    with contextlib.ExitStack() as stack:
        stack.enter_context(ops.constant_weights())
        if isinstance(device, EmulatedDevice):  # which must know what may be read early
            emulator = Emulator(request.getfixturevalue("emulated_library"))
            weights = [value for value in linear.arguments.values() if isinstance(value, Tensor)]
            stack.enter_context(emulator.constant_memory(*weights, options["norm_weight"]))
        assert_bitwise(linear.run(x, **options), expected)


@pytest.mark.parametrize("tokens", [1, 19, 70])
@pytest.mark.parametrize("offset", [0, 1])
def test_strided_rows(offset: int, tokens: int, device: str) -> None:
    """Rows that are aligned are read where they lie, others copied; what lies beside them is NaN."""
    x = torch.randn(tokens, 64, device=device).bfloat16()
    linear = Linear("int4", 33, 64, torch.bfloat16, device)
    memory = torch.cat([x.new_full((tokens, offset), torch.nan), x], 1)
    guarded = Guarded(memory)
    for options in ({}, {"norm_weight": torch.ones(64, device=device)}):
        assert_bitwise(linear.run(guarded.view[:, offset:], **options), linear.run(x, **options))


@pytest.mark.parametrize("form", ["int4 min", "int8 min"])
def test_padded_rows_do_not_matter(form: str, device: str) -> None:
    linear = Linear(form, 17, 64, torch.bfloat16, device)
    x = [torch.randn(tokens, 64, device=device).bfloat16() for tokens in (5, 66)]
    expected = [linear.run(rows) for rows in x]
    linear.arguments["scales"][1, :, 1:] = torch.nan
    linear.arguments["mins"][1, :, 1:] = torch.nan
    for rows, out in zip(x, expected, strict=True):
        assert_bitwise(linear.run(rows), out)


@pytest.mark.parametrize("tokens", [5, 19, 70])
def test_nan_and_infinity_show_in_their_row_alone(tokens: int, device: str) -> None:
    x = torch.randn(tokens, 64, device=device).bfloat16()
    linear = Linear("int4", 33, 64, torch.bfloat16, device)
    clean = linear.run(x)
    x[1, 40], x[3, 7] = torch.nan, torch.inf
    out = linear.run(x)
    assert not out[[1, 3]].isfinite().any()
    others = [row for row in range(tokens) if row not in (1, 3)]
    assert_bitwise(out[others], clean[others])


def test_fp16_norm_of_large_values_does_not_overflow(device: str) -> None:
    """6e4 times a norm weight of 3 is past fp16's range."""
    x = (torch.randn(3, 64, device=device).sign() * 6e4).half()
    linear = Linear("dense", 16, 64, torch.float16, device)
    assert_exact(linear, x, 2e-3, norm_weight=torch.full((64,), 3.0, device=device))


def test_no_tokens(device: str) -> None:
    for form in FORMATS:
        assert Linear(form, 17, 64, torch.float16, device).run(torch.zeros(0, 64, device=device).half()).shape == (
            0,
            17,
        )


@pytest.mark.parametrize("form", FORMATS)
def test_fp32_is_refused(form: str, device: str) -> None:
    linear = Linear(form, 17, 64, torch.float32, device)
    with pytest.raises(RuntimeError, match="x must be bfloat16 or float16 on a GPU, got float32"):
        linear.run(torch.zeros(2, 64, device=device))


@pytest.mark.parametrize("activation_bits", [8, 16])
def test_quantised_activations_are_refused(activation_bits: int, device: str) -> None:
    linear = Linear("int4", 17, 64, torch.float16, device)
    with pytest.raises(RuntimeError, match=f"activation_bits must be 32 on a GPU.* got {activation_bits}"):
        linear.run(torch.zeros(2, 64, device=device).half(), activation_bits=activation_bits)


def test_dense_weights_that_do_not_fit_are_refused(device: str) -> None:
    x = torch.zeros(2, 12, device=device).half()
    with pytest.raises(RuntimeError, match="multiple of 8 columns on a GPU, got 12"):
        ops.gemm(x, torch.zeros(3, 12, device=device).half())
    with pytest.raises(RuntimeError, match="weight must be float16, got bfloat16"):
        ops.gemm(x[:, :8], torch.zeros(3, 8, device=device).bfloat16())
    with pytest.raises(RuntimeError, match="weight must start at a multiple of 16 bytes"):
        ops.gemm(x[:, :8], torch.zeros(25, device=device).half()[1:].view(3, 8))


def test_unaligned_scales_are_refused(device: str) -> None:
    x, scales = torch.zeros(2, 32, device=device), torch.zeros(17, device=device)[1:].view(1, 1, 16)
    weight = ops.int8_pack(torch.zeros(16, 32, dtype=torch.int8, device=device))
    with pytest.raises(RuntimeError, match="scales must start at a multiple of 16 bytes on a GPU"):
        ops.w8a8_gemm(x.to(torch.int8), torch.zeros(2, device=device), weight, scales, 16)
    with pytest.raises(RuntimeError, match="scales must start at a multiple of 16 bytes on a GPU"):
        ops.int8_gemm(x.half(), weight, scales, None, 16)
