"""Rows of a dense table: bitwise; and added to a residual, with one rounding."""

import pytest
import torch
from support.helpers import DTYPES, assert_bitwise, assert_rounded, device_fixture, per_thread_count
from torch import Tensor

from fastinfer import ops

device = device_fixture("cpu", "avx512", "cuda", "emulated")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [1, 7, 64, 577, 2304])
@pytest.mark.parametrize("tokens", [0, 1, 19])
def test_embedding(tokens: int, hidden: int, dtype: torch.dtype, device: str) -> None:
    weight = torch.randn(33, hidden, device=device).to(dtype)
    ids = torch.randint(0, 33, (tokens,), device=device)
    ids[:1], ids[1:2] = 32, 0
    weight[1:32][~torch.isin(torch.arange(1, 32, device=device), ids)] = torch.nan  # rows that nobody asked for
    out = ops.embedding(weight, ids)
    assert out.isfinite().all()
    assert_bitwise(out, weight[ids])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "hidden"), [(0, 64), (1, 1), (3, 7), (19, 64), (2, 2304)])
def test_residual(tokens: int, hidden: int, weight_dtype: torch.dtype, dtype: torch.dtype, device: str) -> None:
    weight = torch.randn(33, hidden, device=device).to(weight_dtype)
    ids = torch.randint(0, 33, (tokens,), device=device)
    residual = torch.randn(tokens, hidden, device=device).to(dtype)
    before = residual.clone()
    out = ops.embedding(weight, ids, residual)
    assert out.dtype == dtype
    assert_rounded(out, residual.double() + weight[ids].double())
    assert_bitwise(residual, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
def test_dtype(weight_dtype: torch.dtype, dtype: torch.dtype, device: str) -> None:
    weight = torch.randn(5, 65, device=device).to(weight_dtype)
    ids = torch.tensor([4, 0, 4], device=device)
    assert_bitwise(ops.embedding(weight, ids, dtype=dtype), weight[ids].to(dtype))
    with pytest.raises(RuntimeError, match="dtype must be None"):
        ops.embedding(weight, ids, weight[:3], dtype)


def test_every_16_bit_number_is_copied(device: str) -> None:
    """Subnormals, infinities and the sign of zero too."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16, device=device)
    for dtype in (torch.bfloat16, torch.float16):
        weight = every.view(dtype).view(64, 1024)
        out = ops.embedding(weight, torch.arange(64, device=device))
        assert_bitwise(out, weight)
        assert_bitwise(out.signbit() | out.isnan(), weight.signbit() | weight.isnan())


def test_unaligned_table(device: str) -> None:
    memory = torch.randn(5 * 64 + 1, device=device)
    for weight, residual in ((memory[1:], memory[:192]), (memory[:-1], memory[1:193])):
        weight, residual = weight.view(5, 64), residual.view(3, 64)
        ids = torch.tensor([4, 0, 4], device=device)
        assert_bitwise(ops.embedding(weight, ids), weight[ids])
        assert_bitwise(ops.embedding(weight, ids, residual), residual + weight[ids])


def test_no_columns(device: str) -> None:
    assert ops.embedding(torch.zeros(3, 0, device=device), torch.tensor([2], device=device)).shape == (1, 0)


def test_threads(device: str) -> None:
    weight, ids = torch.randn(99, 64, device=device), torch.randint(0, 99, (200,), device=device)
    assert_bitwise(*per_thread_count(lambda: ops.embedding(weight, ids)))


@pytest.mark.parametrize("outside", [-1, 33, 2**62])
def test_ids_outside_the_table(outside: int, device: str, request: pytest.FixtureRequest) -> None:
    weight = torch.randn(33, 64, device=device)
    ids = torch.tensor([5, outside, 32], device=device)
    if request.node.callspec.params["device"] in ("cpu", "avx512"):
        with pytest.raises(RuntimeError, match=r"ids\[1\]"):
            ops.embedding(weight, ids)
    else:
        out = ops.embedding(weight, ids)
        assert out[1].eq(0).all()
        assert_bitwise(out[::2], weight[ids[::2]])
        assert_bitwise(ops.embedding(weight, ids, weight[:3])[1], weight[1])


WEIGHT, IDS = torch.zeros(5, 8), torch.arange(3)
BAD: dict[str, tuple[str, Tensor, Tensor]] = {
    "weight dtype": ("weight", WEIGHT.int(), IDS),
    "weight 1-d": ("weight", WEIGHT[0], IDS),
    "weight strided": ("weight", WEIGHT[:, :4], IDS),
    "ids dtype": ("ids", WEIGHT, IDS.int()),
    "ids 2-d": ("ids", WEIGHT, IDS[None]),
    "ids strided": ("ids", WEIGHT, torch.zeros(6, dtype=torch.int64)[::2]),
}


@pytest.mark.parametrize("case", BAD)
def test_errors_name_the_argument(case: str) -> None:
    argument, weight, ids = BAD[case]
    with pytest.raises((RuntimeError, ValueError), match=rf"\b{argument}\b"):
        ops.embedding(weight, ids)


BAD_RESIDUAL = {
    "tokens": torch.zeros(2, 8),
    "hidden": torch.zeros(3, 7),
    "dtype": torch.zeros(3, 8).int(),
    "strided": torch.zeros(3, 16)[:, :8],
}


@pytest.mark.parametrize("case", BAD_RESIDUAL)
def test_errors_name_the_residual(case: str) -> None:
    with pytest.raises((RuntimeError, ValueError), match=r"^embedding: residual\b"):
        ops.embedding(WEIGHT, IDS, BAD_RESIDUAL[case])


def test_a_dtype_beside_a_residual_is_refused() -> None:
    with pytest.raises(RuntimeError, match="embedding: dtype must be None with a residual"):
        ops.embedding(WEIGHT, IDS, torch.zeros(3, 8), torch.float32)
