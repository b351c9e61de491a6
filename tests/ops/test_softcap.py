"""Soft-capped logits, in place, against fp64."""

import pytest
import torch
from support import reference
from support.helpers import DTYPES, assert_bitwise, assert_rounded, device_fixture, per_thread_count
from torch import Tensor

from fastinfer import ops

device = device_fixture("cpu", "avx512", "cuda", "emulated")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cap", [0.5, 30.0])
@pytest.mark.parametrize("shape", [(), (0, 5), (1, 1), (2, 7), (3, 1024), (1, 5001), (2, 3, 16)])
def test_softcap(shape: tuple[int, ...], cap: float, dtype: torch.dtype, device: str) -> None:
    x = (2 * cap * torch.randn(shape, device=device)).to(dtype)
    expected = reference.softcap(x, cap)
    assert ops.softcap(x, cap) is None
    assert_rounded(x, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_whole_range(dtype: torch.dtype, device: str) -> None:
    """Odd length: the vector loop and its tail both see large values; what is infinite becomes the cap."""
    large = torch.tensor([-torch.inf, -6e4, -2000.0, -0.0, 0.0, 1e-4, 2000.0, 6e4, torch.inf])
    x = torch.cat([large, torch.linspace(-200, 200, 601), large]).to(device, dtype)
    expected = reference.softcap(x, 30.0)
    ops.softcap(x, 30.0)
    assert_rounded(x, expected)


def test_unaligned_memory_and_its_neighbours(device: str) -> None:
    memory = torch.full((66,), torch.nan, device=device)
    x = memory[1:65]
    x.copy_(torch.randn(64))
    expected = reference.softcap(x, 1.0)
    ops.softcap(x, 1.0)
    assert_rounded(x, expected)
    assert memory[[0, 65]].isnan().all()


def test_nan_stays_in_its_element(device: str) -> None:
    x = torch.randn(2, 38, device=device)
    x[0, 5] = x[1, 37] = torch.nan
    ops.softcap(x, 30.0)
    assert x.isnan().nonzero().tolist() == [[0, 5], [1, 37]]


def test_a_row_does_not_depend_on_its_batch_or_the_threads(device: str) -> None:
    x = 50 * torch.randn(9, 1111, device=device)

    def capped(x: Tensor) -> Tensor:
        ops.softcap(x := x.clone(), 30.0)
        return x

    one, two = per_thread_count(lambda: capped(x))
    assert_bitwise(one, two)
    assert_bitwise(torch.cat([capped(row) for row in x.split(1)]), one)


X = torch.zeros(2, 8)
BAD: dict[str, tuple[str, Tensor, float]] = {
    "x dtype": ("x", X.int(), 30.0),
    "x double": ("x", X.double(), 30.0),
    "x strided": ("x", torch.zeros(2, 16)[:, :8], 30.0),
    "x expanded": ("x", torch.zeros(1, 8).expand(2, 8), 30.0),
    "cap zero": ("cap", X, 0.0),
    "cap negative": ("cap", X, -30.0),
    "cap infinite": ("cap", X, float("inf")),
    "cap nan": ("cap", X, float("nan")),
    "cap below fp32": ("cap", X, 1e-50),
}


@pytest.mark.parametrize("case", BAD)
def test_errors_name_the_argument(case: str) -> None:
    argument, x, cap = BAD[case]
    with pytest.raises((RuntimeError, ValueError), match=rf"^softcap: {argument}\b"):
        ops.softcap(x, cap)
