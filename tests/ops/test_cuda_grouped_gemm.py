"""The CUDA products with a stack of experts, all weight formats through one set of cases, against fp64."""

import pytest
import torch
from support import reference
from support.expert_stack import FORMATS, ExpertStack, random_ids
from support.helpers import Guarded, assert_bitwise, assert_rounded, device_fixture

device = device_fixture("cuda", "emulated")

DTYPES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "out_features", "in_features"),
    [
        (1, 1, 4, 17, 32),
        (1, 2, 8, 130, 96),
        (17, 4, 60, 33, 64),
        (12, 2, 2, 49, 224),
        (40, 2, 3, 33, 64),
        (30, 4, 12, 130, 64),
    ],
)
def test_few_rows_round_the_result_only(
    tokens: int,
    top_k: int,
    experts: int,
    out_features: int,
    in_features: int,
    form: str,
    dtype: torch.dtype,
    device: str,
) -> None:
    """Tiles of 8 and of 32 tokens; x with a row per token, then with a row per token and expert."""
    ids = random_ids(tokens, top_k, experts, device)
    stack = ExpertStack(form, experts, out_features, in_features, dtype, device)
    for rows in (tokens, tokens * top_k):
        x = torch.randn(rows, in_features, device=device).to(dtype)
        out = stack.run(x, ids)
        assert out.dtype == dtype
        assert_rounded(out, reference.grouped_gemm(x, stack.dense, ids), slack=1e-5)


@pytest.mark.parametrize("form", [form for form in FORMATS if form != "dense"])
@pytest.mark.parametrize(("group", "in_features"), [(64, 192), (128, 384), (384, 384)])
def test_groups_that_have_kernels_of_their_own(group: int, in_features: int, form: str, device: str) -> None:
    for tokens, dtype in ((5, torch.bfloat16), (40, torch.half)):
        ids = random_ids(tokens, 2, 3, device)
        stack = ExpertStack(form, 3, 33, in_features, dtype, device, group)
        x = torch.randn(tokens, in_features, device=device).to(dtype)
        assert_rounded(stack.run(x, ids), reference.grouped_gemm(x, stack.dense, ids), slack=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("tokens", "experts", "most"), [(150, 3, 135), (535, 2, 270)])
def test_many_rows_are_as_good_as_a_dequantised_weight(
    tokens: int, experts: int, most: int, form: str, dtype: torch.dtype, device: str
) -> None:
    """Tiles of 128 and of 256 rows, of which one expert has one full and one with few rows."""
    ids = torch.arange(tokens, device=device)[:, None] % experts
    ids[:most] = 1
    ids[most:][ids[most:] == 1] = 0
    ids = ids[torch.randperm(tokens, device=device)]
    stack = ExpertStack(form, experts, 40, 224, dtype, device)
    x = torch.randn(tokens, 224, device=device).to(dtype)
    expected = reference.grouped_gemm(x, stack.dense, ids)
    low_precision = torch.einsum("tk,tnk->tn", x, stack.dense.to(dtype)[ids[:, 0]])
    error, allowed = ((out.double() - expected).square().mean().sqrt() for out in (stack.run(x, ids), low_precision))
    assert error <= 2 * allowed


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu", "clamped_swiglu"])
def test_activations(activation: str, device: str) -> None:
    """The product of gate and up carries the errors of both."""
    for form, tokens, dtype in [("int4 min", 3, torch.bfloat16), ("dense", 40, torch.float16), ("int8", 5, torch.half)]:
        ids = random_ids(tokens, 2, 4, device)
        stack = ExpertStack(form, 4, 160, 96, dtype, device)
        x = torch.randn(tokens, 96, device=device).to(dtype)
        expected = reference.grouped_gemm(x, stack.dense, ids, activation=activation)
        assert_rounded(stack.run(x, ids, activation=activation), expected, slack=4e-5)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("tokens", [1, 9, 40])
def test_biases(tokens: int, form: str, device: str) -> None:
    """The width is odd, or that of gate and up; the biases of experts without rows are not read."""
    ids = random_ids(tokens, 2, 6, device).clamp(max=3)
    for out_features, activation, dtype, bias_dtype in (
        (33, None, torch.bfloat16, torch.float32),
        (160, "silu", torch.float16, torch.float16),
        (96, "clamped_swiglu", torch.bfloat16, torch.float32),
    ):
        stack = ExpertStack(form, 6, out_features, 96, dtype, device)
        x = torch.randn(tokens, 96, device=device).to(dtype)
        bias = (3 * torch.randn(6, out_features, device=device)).to(bias_dtype)
        bias[4:] = torch.nan
        out = stack.run(x, ids, bias=bias, activation=activation)
        expected = reference.grouped_gemm(x, stack.dense, ids, bias=bias, activation=activation)
        assert_rounded(out, expected, slack=2e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_biases_of_many_rows(dtype: torch.dtype, device: str) -> None:
    """The rows of two experts in tiles of 128 and more; every row has the bias of its own."""
    ids = torch.arange(300, device=device)[:, None] % 2
    ids[:250] = 1
    stack = ExpertStack("int4", 3, 40, 224, dtype, device)
    x = torch.randn(300, 224, device=device).to(dtype)
    bias = torch.tensor([100.0, -100.0, torch.nan], device=device)[:, None].repeat(1, 40)
    shift = stack.run(x, ids, bias=bias).double() - stack.run(x, ids).double()
    torch.testing.assert_close(shift, bias.double()[ids[:, 0]], rtol=0, atol=1.0)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("tokens", [3, 20, 70])
def test_experts_without_rows_are_not_read(tokens: int, form: str, device: str) -> None:
    stack = ExpertStack(form, 4, 33, 64, torch.bfloat16, device)
    x = torch.randn(tokens, 64, device=device).bfloat16()
    ids = torch.full((tokens, 2), 2, device=device)
    expected = stack.run(x, ids)
    stack.poison(torch.tensor([0, 1, 3], device=device))
    assert_bitwise(stack.run(x, ids), expected)


def test_a_token_does_not_depend_on_the_others_within_a_tile(device: str) -> None:
    ids = random_ids(6, 2, 8, device)
    stack = ExpertStack("int4", 8, 130, 96, torch.bfloat16, device)
    x = torch.randn(6, 96, device=device).bfloat16()
    out = stack.run(x, ids, activation=None)
    assert_bitwise(torch.cat([stack.run(*part) for part in zip(x.split(1), ids.split(1), strict=True)]), out)


@pytest.mark.parametrize("offset", [0, 1])
def test_strided_rows(offset: int, device: str) -> None:
    """Rows that are aligned are read where they lie, others copied; what lies beside them is NaN."""
    ids = random_ids(5, 2, 4, device)
    stack = ExpertStack("int4", 4, 33, 64, torch.bfloat16, device)
    x = torch.randn(5, 64, device=device).bfloat16()
    guarded = Guarded(torch.cat([x.new_full((5, offset), torch.nan), x], 1))
    assert_bitwise(stack.run(guarded.view[:, offset:], ids), stack.run(x, ids))


def test_nan_shows_in_its_rows_alone(device: str) -> None:
    ids = random_ids(20, 2, 4, device)
    stack = ExpertStack("int4 min", 4, 33, 64, torch.bfloat16, device)
    x = torch.randn(20, 64, device=device).bfloat16()
    clean = stack.run(x, ids)
    x[3, 7] = torch.nan
    out = stack.run(x, ids)
    assert not out[6:8].isfinite().any()
    assert_bitwise(torch.cat([out[:6], out[8:]]), torch.cat([clean[:6], clean[8:]]))


@pytest.mark.parametrize("form", FORMATS)
def test_no_tokens(form: str, device: str) -> None:
    stack = ExpertStack(form, 4, 33, 64, torch.float16, device)
    out = stack.run(torch.zeros(0, 64, device=device).half(), torch.zeros(0, 2, device=device))
    assert out.shape == (0, 33)


@pytest.mark.parametrize("form", FORMATS)
def test_fp32_is_refused(form: str, device: str) -> None:
    stack = ExpertStack(form, 4, 17, 64, torch.float32, device)
    with pytest.raises(RuntimeError, match="x must be bfloat16 or float16 on a GPU, got float32"):
        stack.run(torch.zeros(2, 64, device=device), torch.zeros(2, 1, device=device))


def test_what_a_gpu_cannot_do_is_refused(device: str) -> None:
    x, ids = torch.zeros(2, 64, device=device).half(), torch.zeros(2, 1, device=device)
    with pytest.raises(RuntimeError, match=r"activation_bits must be 32 on a GPU.* got 8"):
        ExpertStack("int4", 4, 17, 64, torch.half, device).run(x, ids, activation_bits=8)
    with pytest.raises(RuntimeError, match="weight must be float16, got bfloat16"):
        ExpertStack("dense", 4, 17, 64, torch.bfloat16, device).run(x, ids)
    with pytest.raises(RuntimeError, match="multiple of 8 columns on a GPU, got 12"):
        ExpertStack("dense", 4, 17, 12, torch.half, device).run(x[:, :12], ids)
