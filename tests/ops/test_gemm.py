"""The dense linear layer with its fused prologues and epilogues against fp64."""

from functools import partial
from typing import Any

import pytest
import torch
from support import reference
from support.helpers import (
    DTYPES,
    GEMM_FUSIONS,
    Guarded,
    assert_bitwise,
    assert_rounded,
    device_fixture,
    per_thread_count,
)
from support.helpers import gemm_options as options_of
from torch import Tensor

from fastinfer import ops
from fastinfer.ops.pack import interleave_gate_up

device = device_fixture("cpu", "avx512")


def assert_gemm(x: Tensor, weight: Tensor, **options: Any) -> None:
    out = ops.gemm(x, weight, **options)
    assert out.dtype == x.dtype
    assert_rounded(out, reference.gemm(x, weight, **options), slack=1e-5)


def operands(
    tokens: int, out_features: int, in_features: int, dtype: torch.dtype, weight_dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor]:
    x = torch.randn(tokens, in_features, device=device).to(dtype)
    weight = torch.randn(out_features, in_features, device=device) * in_features**-0.5
    return x, weight.to(weight_dtype)


@pytest.mark.parametrize("in_features", [1, 7, 32, 111, 576])
@pytest.mark.parametrize("out_features", [1, 15, 17, 64, 1000])
@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 5, 17, 130])
def test_shapes(tokens: int, out_features: int, in_features: int, device: str) -> None:
    assert_gemm(*operands(tokens, out_features, in_features, torch.float32, torch.float32, device))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 3, 64])
def test_dtypes(tokens: int, weight_dtype: torch.dtype, dtype: torch.dtype, device: str) -> None:
    assert_gemm(*operands(tokens, 49, 1536, dtype, weight_dtype, device))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fusion", GEMM_FUSIONS)
def test_fusions(fusion: str, dtype: torch.dtype, device: str) -> None:
    for tokens in (1, 5, 33):
        x, weight = operands(tokens, 96, 576, dtype, dtype, device)
        for vector_dtype in {torch.float32, dtype}:
            assert_gemm(x, weight, **options_of(fusion, x, 96, vector_dtype))


def test_eps_reaches_the_norm(device: str) -> None:
    x, weight = operands(3, 17, 64, torch.float32, torch.float32, device)
    assert_gemm(x * 1e-2, weight, norm_weight=torch.ones(64, device=device), eps=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 19])
def test_strided_rows(tokens: int, dtype: torch.dtype, device: str) -> None:
    x, weight = operands(tokens, 33, 64, dtype, dtype, device)
    guarded = Guarded(x)
    norm_weight = torch.ones(64, device=device)
    expected = ops.gemm(x, weight, norm_weight=norm_weight)
    assert_bitwise(ops.gemm(guarded.view, weight, norm_weight=norm_weight), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fusion", GEMM_FUSIONS)
def test_a_row_does_not_depend_on_its_batch_or_the_threads(fusion: str, dtype: torch.dtype, device: str) -> None:
    x, weight = operands(33, 96, 576, dtype, dtype, device)
    options = options_of(fusion, x, 96, torch.float32)
    one, two = per_thread_count(lambda: ops.gemm(x, weight, **options))
    assert_bitwise(one, two)
    for size in (1, 3, 8):
        chunks = [
            ops.gemm(rows, weight, **options | ({"residual": residual} if "residual" in options else {}))
            for rows, residual in zip(x.split(size), options.get("residual", x).split(size), strict=True)
        ]
        assert_bitwise(torch.cat(chunks), one)


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_units_that_are_finished_together(dtype: torch.dtype, activation: str | None, device: str) -> None:
    """With up to eight rows the sums of eight units; here there are 34 or 17, on one thread and on two."""
    x, weight = operands(9, 544, 64, dtype, dtype, device)
    options = {"bias": torch.randn(544, device=device), "activation": activation}
    expected = ops.gemm(x, weight, **options)
    for size in (1, 8):
        run = partial(lambda size: torch.cat([ops.gemm(rows, weight, **options) for rows in x.split(size)]), size)
        for out in per_thread_count(run):
            assert_bitwise(out, expected)


@pytest.mark.parametrize("in_features", [999, 2109, 4109])
@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_in_several_chunks(dtype: torch.dtype, in_features: int, device: str) -> None:
    """One to two chunks (four of fp32) and a part of a vector, in every block of rows from one to eight."""
    x, weight = operands(8, 35, in_features, dtype, dtype, device)
    assert_gemm(x, weight)
    out = ops.gemm(x, weight)
    for size in range(1, 8):
        assert_bitwise(torch.cat([ops.gemm(rows, weight) for rows in x.split(size)]), out)


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_in_several_sweeps(dtype: torch.dtype, activation: str | None, device: str) -> None:
    """512 rows and 18 of the next sweep, with outputs of more than one group, over a chunk and a part (two of fp32)."""
    x, weight = operands(530, 160, 2109, dtype, dtype, device)
    options = {"bias": torch.randn(160, device=device), "activation": activation}
    assert_gemm(x, weight, **options)
    for out in per_thread_count(lambda: ops.gemm(x, weight, **options)):
        for row in (0, 63, 64, 511, 512, 529):
            assert_bitwise(ops.gemm(x[row : row + 1], weight, **options), out[row : row + 1])


def test_sums_of_more_outputs_where_x_is_large(device: str) -> None:
    """512 rows of so many inputs take more than 16 MB; there is a part of a second group of 128 outputs."""
    x, weight = operands(512, 136, 8200, torch.float32, torch.float32, device)
    assert_gemm(x, weight)
    out = ops.gemm(x, weight)
    for row in (0, 63, 511):
        assert_bitwise(ops.gemm(x[row : row + 1], weight), out[row : row + 1])


def test_nan_stays_in_its_row(device: str) -> None:
    x, weight = operands(19, 40, 64, torch.float32, torch.float32, device)
    x[7, 3] = torch.nan
    out = ops.gemm(x, weight)
    assert out.isnan().any(1).nonzero().flatten().tolist() == [7]
    assert out[7].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_of_an_earlier_call_is_forgotten(dtype: torch.dtype, device: str) -> None:
    """It lies in scratch memory, behind the rows of this call."""
    ops.gemm(torch.full((3, 512), torch.nan, dtype=dtype, device=device), torch.ones(17, 512, device=device).to(dtype))
    assert_gemm(*operands(3, 17, 77, dtype, dtype, device))


def test_reference_is_that_of_torch() -> None:
    """The unfused reference against torch.nn.functional, gate and up with biases of their own."""
    torch.manual_seed(0)
    x, gate, up = torch.randn(5, 64).double(), torch.randn(32, 64).double(), torch.randn(32, 64).double()
    gate_bias, up_bias, norm_weight = torch.randn(32).double(), torch.randn(32).double(), torch.randn(64).double()
    normed = torch.nn.functional.rms_norm(x, (64,), norm_weight, 1e-5)
    expected = torch.nn.functional.silu(normed @ gate.T + gate_bias) * (normed @ up.T + up_bias)
    weight, bias = interleave_gate_up(gate, up), interleave_gate_up(gate_bias, up_bias)
    out = reference.gemm(x, weight, bias=bias, norm_weight=norm_weight, eps=1e-5, activation="silu")
    torch.testing.assert_close(out, expected)


GOOD: dict[str, Any] = {"x": torch.zeros(3, 64), "weight": torch.zeros(32, 64)}
BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "x dtype": ("x", {"x": torch.zeros(3, 64).double()}),
    "x 1-d": ("x", {"x": torch.zeros(64)}),
    "x columns strided": ("x", {"x": torch.zeros(64, 3).T}),
    "in_features": ("x|weight", {"weight": torch.zeros(32, 63)}),
    "weight dtype": ("weight", {"weight": torch.zeros(32, 64).int()}),
    "weight strided": ("weight", {"weight": torch.zeros(64, 32).T}),
    "bias length": ("bias", {"bias": torch.zeros(31)}),
    "bias dtype": ("bias", {"bias": torch.zeros(32).half()}),
    "norm_weight length": ("norm_weight", {"norm_weight": torch.zeros(32)}),
    "norm_weight dtype": ("norm_weight", {"norm_weight": torch.zeros(64).half()}),
    "residual shape": ("residual", {"residual": torch.zeros(3, 64)}),
    "residual dtype": ("residual", {"residual": torch.zeros(3, 32).half()}),
    "unknown activation": ("activation", {"activation": "relu"}),
    "activation and residual": ("residual", {"activation": "silu", "residual": torch.zeros(3, 16)}),
    "half a gate": ("activation|weight|out_features", {"activation": "silu", "weight": torch.zeros(48, 64)}),
}


@pytest.mark.parametrize("case", BAD)
def test_errors_name_the_argument(case: str) -> None:
    argument, change = BAD[case]
    with pytest.raises((RuntimeError, ValueError), match=rf"\b({argument})\b"):
        ops.gemm(**(GOOD | change))
