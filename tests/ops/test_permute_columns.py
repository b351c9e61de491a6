"""Columns in another order: bitwise."""

import pytest
import torch
from support.helpers import DTYPES, Guarded, assert_bitwise, device_fixture, per_thread_count
from torch import Tensor

from fastinfer import ops

device = device_fixture("cpu", "cuda", "emulated")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", [1, 7, 64, 577, 2304])
@pytest.mark.parametrize("tokens", [0, 1, 19])
def test_permute_columns(tokens: int, cols: int, dtype: torch.dtype, device: str) -> None:
    x, permutation = torch.randn(tokens, cols, device=device).to(dtype), torch.randperm(cols).to(device)
    before = x.clone()
    assert_bitwise(ops.permute_columns(x, permutation), x[:, permutation])
    assert_bitwise(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", [64, 77])
def test_strided_rows(cols: int, dtype: torch.dtype, device: str) -> None:
    x, permutation = torch.randn(5, cols, device=device).to(dtype), torch.randperm(cols).to(device)
    guarded = Guarded(x)
    out = ops.permute_columns(guarded.view, permutation)
    assert out.is_contiguous()
    assert_bitwise(out, x[:, permutation])
    assert_bitwise(ops.permute_columns(x[:1].expand(3, cols), permutation), x[:1, permutation].expand(3, cols))


def test_unaligned_memory(device: str) -> None:
    x = torch.randn(3 * 64 + 1, device=device)[1:].view(3, 64)
    permutation = torch.cat([torch.tensor([-1]), torch.randperm(64)]).to(device)[1:]
    assert_bitwise(ops.permute_columns(x, permutation), x[:, permutation])


def test_a_column_may_come_twice_and_nan_is_not_read_elsewhere(device: str) -> None:
    x = torch.randn(3, 40, device=device)
    x[:, 11] = torch.nan
    permutation = torch.full((40,), 7, device=device)
    assert_bitwise(ops.permute_columns(x, permutation), x[:, permutation])


def test_no_columns(device: str) -> None:
    assert ops.permute_columns(torch.zeros(3, 0, device=device), torch.zeros(0).long().to(device)).shape == (3, 0)


def test_threads(device: str) -> None:
    x, permutation = torch.randn(99, 64, device=device), torch.randperm(64).to(device)
    assert_bitwise(*per_thread_count(lambda: ops.permute_columns(x, permutation)))


@pytest.mark.parametrize("cols", [64, 33])
@pytest.mark.parametrize("outside", [-1, 64, 2**62])
def test_indices_outside(outside: int, cols: int, device: str, request: pytest.FixtureRequest) -> None:
    x, permutation = torch.randn(3, cols, device=device), torch.randperm(cols).to(device)
    permutation[5] = outside
    if request.node.callspec.params["device"] == "cpu":
        with pytest.raises(RuntimeError, match=r"permutation\[5\]"):
            ops.permute_columns(x, permutation)
        return
    out = ops.permute_columns(x, permutation)
    assert out[:, 5].eq(0).all()
    assert_bitwise(out[:, 6:], x[:, permutation[6:]])


X, IDENTITY = torch.zeros(2, 8), torch.arange(8)
BAD: dict[str, tuple[str, Tensor, Tensor]] = {
    "x dtype": ("x", X.int(), IDENTITY),
    "x 1-d": ("x", X[0], IDENTITY),
    "x columns strided": ("x", torch.zeros(8, 2).T, IDENTITY),
    "permutation length": ("permutation", X, IDENTITY[:7]),
    "permutation dtype": ("permutation", X, IDENTITY.int()),
    "permutation 2-d": ("permutation", X, IDENTITY[None]),
    "permutation strided": ("permutation", X, torch.zeros(16).long()[::2]),
}


@pytest.mark.parametrize("case", BAD)
def test_errors_name_the_argument(case: str) -> None:
    argument, x, permutation = BAD[case]
    with pytest.raises((RuntimeError, ValueError), match=rf"^permute_columns: {argument}\b"):
        ops.permute_columns(x, permutation)
