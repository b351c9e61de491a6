"""RMSNorm with the residual added before, after or not, against fp64."""

import pytest
import torch
from support import reference
from support.helpers import DTYPES, assert_bitwise, assert_rounded, device_fixture, per_thread_count
from torch import Tensor

from fastinfer import ops

device = device_fixture("cpu", "avx512", "cuda", "emulated")

TOLERANCE = {
    torch.float32: {"rtol": 1e-6, "atol": 1e-6},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1e-5},
    torch.float16: {"rtol": 2e-3, "atol": 1e-5},
}


def assert_norm(out: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(out.double(), expected, **TOLERANCE[out.dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [1, 7, 111, 576, 4096])
@pytest.mark.parametrize("tokens", [0, 1, 2, 19, 99])
def test_rms_norm(tokens: int, hidden: int, dtype: torch.dtype, device: str) -> None:
    x = torch.randn(tokens, hidden, device=device).to(dtype)
    weight = (torch.randn(hidden, device=device) + 1).to(dtype)
    out = ops.rms_norm(x, weight, 1e-5)
    assert out.dtype == dtype
    assert_norm(out, reference.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(576,), (2, 3, 64), (0, 5, 7)])
def test_leading_dimensions_and_fp32_weight(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    x = torch.randn(shape, device=device).to(dtype)
    weight = torch.randn(shape[-1], device=device)
    assert_norm(ops.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("magnitude", [6e4, 1e-3])
def test_squares_do_not_overflow_and_eps_counts(magnitude: float, dtype: torch.dtype, device: str) -> None:
    """6e4 squared is past fp16's range; 1e-3 squared equals eps. On a GPU 1111 elements take two sweeps of a block."""
    x = (torch.rand(3, 1111, device=device) * magnitude).to(dtype)
    weight = torch.ones(1111, device=device)
    assert_norm(ops.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))


def test_zero_row_gives_zeros_and_nan_stays_in_its_row(device: str) -> None:
    x = torch.randn(3, 100, device=device)
    x[0] = 0
    x[1, 50] = torch.nan
    out = ops.rms_norm(x, torch.ones(100, device=device))
    assert out[0].eq(0).all()
    assert out[1].isnan().all()
    assert out[2].isfinite().all()


@pytest.mark.repeats
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_its_batch_or_the_threads(dtype: torch.dtype, device: str) -> None:
    x = torch.randn(99, 1111, device=device).to(dtype)
    weight = torch.randn(1111, device=device)
    one, two = per_thread_count(lambda: ops.rms_norm(x, weight))
    assert_bitwise(one, two)
    assert_bitwise(torch.cat([ops.rms_norm(row, weight) for row in x.split([1, 2, 7, 89])]), one)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [1, 7, 111, 576, 4096])
@pytest.mark.parametrize("tokens", [0, 1, 19])
def test_add_rms_norm(tokens: int, hidden: int, dtype: torch.dtype, device: str) -> None:
    x, residual = torch.randn(2, tokens, hidden, device=device).to(dtype)
    weight = torch.randn(hidden, device=device).to(dtype)
    expected, total = reference.add_rms_norm(x, residual, weight, 1e-5)
    before = x.clone()
    out = ops.add_rms_norm(x, residual, weight, 1e-5)
    assert_bitwise(residual, total)
    assert_bitwise(x, before)
    assert_norm(out, expected)
    assert_bitwise(out, ops.rms_norm(residual, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [1, 7, 111, 576, 4096])
@pytest.mark.parametrize("tokens", [0, 1, 19])
def test_residual_after_the_norm(tokens: int, hidden: int, dtype: torch.dtype, device: str) -> None:
    """One rounding, where the norm and the sum as two operations would have two."""
    x, residual = torch.randn(2, tokens, hidden, device=device).to(dtype)
    for weight in (torch.randn(hidden, device=device), torch.randn(hidden, device=device).to(dtype)):
        before = x.clone(), residual.clone()
        assert_rounded(ops.rms_norm(x, weight, 1e-5, residual), reference.rms_norm(x, weight, 1e-5, residual))
        assert_bitwise(x, before[0])
        assert_bitwise(residual, before[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [7, 576, 20000])
def test_factor_of_the_sum(hidden: int, dtype: torch.dtype, device: str) -> None:
    x, residual = torch.randn(2, 3, hidden, device=device).to(dtype)
    weight = torch.randn(hidden, device=device)
    for addend in (residual, None):
        out = ops.rms_norm(x, weight, 1e-5, addend, 0.37)
        # Terms that cancel may be several times larger than the mean.
        assert_rounded(out, reference.rms_norm(x, weight, 1e-5, addend, 0.37), slack=4e-6)


def test_residual_may_be_unaligned_or_x_itself(device: str) -> None:
    x, weight = torch.randn(3, 576, device=device), torch.randn(576, device=device)
    residual = torch.randn(3 * 576 + 1, device=device)[1:].view(3, 576)
    for other in (residual, x):
        assert_rounded(ops.rms_norm(x, weight, 1e-6, other), reference.rms_norm(x, weight, 1e-6, other))


X = torch.zeros(2, 8)
BAD_RMS_NORM: dict[str, tuple[str, Tensor, Tensor]] = {
    "x dtype": ("x", X.int(), torch.ones(8)),
    "x double": ("x", X.double(), torch.ones(8)),
    "x strided": ("x", torch.zeros(2, 16)[:, :8], torch.ones(8)),
    "x scalar": ("x", torch.tensor(1.0), torch.ones(1)),
    "weight length": ("weight", X, torch.ones(7)),
    "weight 2-d": ("weight", X, torch.ones(1, 8)),
    "weight dtype": ("weight", X.half(), torch.ones(8, dtype=torch.bfloat16)),
    "weight strided": ("weight", X, torch.ones(16)[::2]),
}


@pytest.mark.parametrize("case", BAD_RMS_NORM)
def test_rms_norm_errors_name_the_argument(case: str) -> None:
    argument, x, weight = BAD_RMS_NORM[case]
    with pytest.raises((RuntimeError, ValueError), match=rf"\b{argument}\b"):
        ops.rms_norm(x, weight)


BAD_RESIDUAL = {
    "shape": torch.zeros(1, 8),
    "dtype": X.half(),
    "strided": torch.zeros(2, 16)[:, :8],
}


@pytest.mark.parametrize("case", BAD_RESIDUAL)
def test_errors_name_the_residual(case: str) -> None:
    with pytest.raises((RuntimeError, ValueError), match=r"\bresidual\b"):
        ops.add_rms_norm(X, BAD_RESIDUAL[case], torch.ones(8))
    with pytest.raises((RuntimeError, ValueError), match=r"^rms_norm: residual\b"):
        ops.rms_norm(X, torch.ones(8), residual=BAD_RESIDUAL[case])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_weight_on_another_device_is_refused() -> None:
    with pytest.raises((RuntimeError, ValueError), match=r"\bweight\b"):
        ops.rms_norm(X.cuda(), torch.ones(8))
