"""LayerNorm against fp64."""

import pytest
import torch
from support import reference
from support.helpers import DTYPES, assert_bitwise, assert_rounded, device_fixture, per_thread_count
from torch import Tensor

from fastinfer import ops

device = device_fixture("cpu", "avx512", "cuda", "emulated")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [1, 7, 111, 768, 5000])
@pytest.mark.parametrize("tokens", [0, 1, 19])
def test_layer_norm(tokens: int, hidden: int, dtype: torch.dtype, device: str) -> None:
    x = torch.randn(tokens, hidden, device=device).to(dtype)
    for weight_dtype in {dtype, torch.float32}:
        weight, bias = torch.randn(2, hidden, device=device).to(weight_dtype)
        out = ops.layer_norm(x, weight, bias, 1e-5)
        assert out.dtype == dtype
        assert_rounded(out, reference.layer_norm(x, weight, bias, 1e-5))


@pytest.mark.parametrize("hidden", [1032, 4096, 8192, 8200, 20000])
def test_wide_rows(hidden: int, device: str) -> None:
    """One vector a thread, four, and more than registers hold; in fp32 and in 16 bits."""
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(2, hidden, device=device).to(dtype)
        weight, bias = torch.randn(2, hidden, device=device)
        assert_rounded(ops.layer_norm(x, weight, bias, 1e-5), reference.layer_norm(x, weight, bias, 1e-5))


@pytest.mark.parametrize("shape", [(768,), (2, 3, 64), (0, 5, 7), (2, 0)])
def test_leading_dimensions(shape: tuple[int, ...], device: str) -> None:
    x = torch.randn(shape, device=device)
    weight, bias = torch.randn(2, shape[-1], device=device)
    assert_rounded(ops.layer_norm(x, weight, bias, 1e-5), reference.layer_norm(x, weight, bias, 1e-5))


def test_a_mean_far_from_zero_does_not_cancel(device: str) -> None:
    """mean(x^2) - mean(x)^2 in fp32 would be wrong by half the variance here; the mean's own rounding stays."""
    x = torch.randn(3, 769, device=device) + 3000
    weight, bias = torch.ones(769, device=device), torch.zeros(769, device=device)
    out = ops.layer_norm(x, weight, bias, 1e-5)
    torch.testing.assert_close(out.double(), reference.layer_norm(x, weight, bias, 1e-5), rtol=1e-5, atol=2e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_rows_and_eps(dtype: torch.dtype, device: str) -> None:
    """6e4 squared is past fp16's range; the variance of 1e-2 is about eps.

    On a GPU 1111 elements take two sweeps of a block.
    """
    weight, bias = torch.ones(1111, device=device), torch.zeros(1111, device=device)
    for magnitude in (6e4, 1e-2):
        x = (torch.randn(3, 1111, device=device).clamp(-1, 1) * magnitude).to(dtype)
        assert_rounded(ops.layer_norm(x, weight, bias, 1e-4), reference.layer_norm(x, weight, bias, 1e-4))


def test_constant_row_gives_the_bias_and_nan_stays_in_its_row(device: str) -> None:
    x, bias = torch.randn(3, 100, device=device), torch.randn(100, device=device)
    x[0] = 2
    x[1, 50] = torch.nan
    out = ops.layer_norm(x, torch.ones(100, device=device), bias)
    assert_bitwise(out[0], bias)
    assert out[1].isnan().all()
    assert out[2].isfinite().all()


def test_unaligned_memory(device: str) -> None:
    x, weight, bias = (torch.randn(n * 64 + 1, device=device)[1:] for n in (3, 1, 1))
    x = x.view(3, 64)
    assert_rounded(ops.layer_norm(x, weight, bias, 1e-5), reference.layer_norm(x, weight, bias, 1e-5))


@pytest.mark.repeats
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_its_batch_or_the_threads(dtype: torch.dtype, device: str) -> None:
    x = torch.randn(99, 1111, device=device).to(dtype)
    weight, bias = torch.randn(2, 1111, device=device)
    one, two = per_thread_count(lambda: ops.layer_norm(x, weight, bias))
    assert_bitwise(one, two)
    assert_bitwise(torch.cat([ops.layer_norm(row, weight, bias) for row in x.split([1, 2, 7, 89])]), one)


X, ONES = torch.zeros(2, 8), torch.ones(8)
BAD: dict[str, tuple[str, tuple[Tensor, Tensor, Tensor]]] = {
    "x dtype": ("x", (X.int(), ONES, ONES)),
    "x strided": ("x", (torch.zeros(2, 16)[:, :8], ONES, ONES)),
    "x scalar": ("x", (torch.tensor(1.0), ONES, ONES)),
    "weight length": ("weight", (X, ONES[:7], ONES)),
    "weight dtype": ("weight", (X.half(), ONES.bfloat16(), ONES.bfloat16())),
    "weight strided": ("weight", (X, torch.ones(16)[::2], ONES)),
    "bias length": ("bias", (X, ONES, ONES[:7])),
    "bias dtype": ("bias", (X.half(), ONES, ONES.half())),
    "bias strided": ("bias", (X, ONES, torch.ones(16)[::2])),
}


@pytest.mark.parametrize("case", BAD)
def test_errors_name_the_argument(case: str) -> None:
    argument, arguments = BAD[case]
    with pytest.raises((RuntimeError, ValueError), match=rf"^layer_norm: {argument}\b"):
        ops.layer_norm(*arguments)
