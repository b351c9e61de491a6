"""Values in four bits: the nearest levels of the rotated values, for each block that is filled and no other."""

import pytest
import torch
from support import reference
from support.helpers import DTYPES, GuardedResult, assert_bitwise, per_thread_count
from torch import Tensor

from fastinfer import ops

BLOCKS = 6


def empty_codes(heads: int, head_dim: int, block_size: int) -> Tensor:
    return torch.full((BLOCKS, heads, head_dim // 8 + 1, block_size), -77, dtype=torch.int32)


def assert_codes(codes: Tensor, values: Tensor) -> None:
    """Codes of values [blocks, block_size, heads, head_dim]."""
    reference.assert_nearest_levels(*reference.value_levels(codes), values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("block_size", "heads", "head_dim"), [(16, 3, 64), (8, 1, 8), (32, 1, 80), (24, 7, 256), (8, 2, 24), (40, 1, 48)]
)
def test_codes(block_size: int, heads: int, head_dim: int, dtype: torch.dtype) -> None:
    values = torch.randn(BLOCKS, block_size, heads, head_dim).to(dtype)
    values[3, :, :, 5] *= 100  # a channel that is much larger
    values[4] = 0.0
    codes = GuardedResult(empty_codes(heads, head_dim, block_size))
    ops.store_value_codes(codes.view, values, None, torch.arange(BLOCKS * block_size).flip(0))
    assert_codes(codes.view, values)
    codes.assert_intact()


@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn, torch.uint8])
def test_quantised_values(cache_dtype: torch.dtype) -> None:
    block_size, heads, head_dim = 16, 3, 80
    v = torch.randn(BLOCKS * block_size, heads, head_dim)
    columns = head_dim // 2 if cache_dtype == torch.uint8 else head_dim
    caches = torch.zeros(2, BLOCKS, block_size, heads, columns).to(cache_dtype).unbind()
    if cache_dtype == torch.uint8:
        scales = [torch.zeros(BLOCKS, block_size, heads, *group).half() for group in ((5, 2), (2, 2))]
    else:
        scales = [torch.zeros(BLOCKS, block_size, heads) for _ in range(2)]
    slots = torch.arange(len(v))
    ops.store_kv_cache(v, v, *caches, slots, *scales)
    codes = empty_codes(heads, head_dim, block_size)
    ops.store_value_codes(codes, caches[1], scales[1], slots)
    if cache_dtype == torch.uint8:
        values = reference.dequantize_int4(caches[1], scales[1], 64)
    else:
        values = caches[1].double() * scales[1].double()[..., None]
    assert_codes(codes, values)


def test_only_blocks_that_are_filled() -> None:
    values = torch.randn(BLOCKS, 8, 2, 8)
    codes, expected, every = (empty_codes(2, 8, 8) for _ in range(3))
    ops.store_value_codes(every, values, None, torch.arange(48))
    ops.store_value_codes(codes, values, None, torch.tensor([15, -1, 16, 22, 24, 46]))
    expected[1] = every[1]
    assert_bitwise(codes, expected)
    values[1, 3] = 5.0  # the tokens that were there have been rejected
    ops.store_value_codes(codes, values, None, torch.tensor([11, 12]))
    assert_bitwise(codes, expected)
    ops.store_value_codes(codes, values, None, torch.tensor([13, 14, 15]))
    assert_codes(codes[1:2].contiguous(), values[1:2])


def test_what_is_not_finite_and_what_is_too_small_show_in_the_scale() -> None:
    values = torch.randn(BLOCKS, 8, 1, 24)
    values[0, 0, 0, 3], values[0, 1, 0, 3], values[2, 2, 0] = torch.nan, torch.inf, 1e-41
    codes = empty_codes(1, 24, 8)
    ops.store_value_codes(codes, values, None, torch.arange(48))
    _, scales = reference.value_levels(codes)
    assert scales.isnan().nonzero().tolist() == [[0, 0, 0], [0, 1, 0]]
    assert (scales == 0).nonzero().tolist() == [[2, 2, 0]]


def test_threads() -> None:
    values = torch.randn(BLOCKS, 16, 3, 64)

    def store() -> Tensor:
        codes = empty_codes(3, 64, 16)
        ops.store_value_codes(codes, values, None, torch.arange(BLOCKS * 16))
        return codes

    assert_bitwise(*per_thread_count(store))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"codes": torch.zeros(6, 2, 2, 8)}, "codes must be int32, got float32"),
        (
            {"codes": torch.zeros(6, 2, 2, 4).int()},
            r"codes must have a block size that is a multiple of 8 and at least two words, got \[6, 2, 2, 4",
        ),
        ({"codes": torch.zeros(6, 2, 1, 8).int()}, "multiple of 8 and at least two words, got"),
        ({"v_cache": torch.zeros(5, 8, 2, 8)}, "v_cache must have the shape"),
        ({"v_scale": torch.zeros(6, 8, 2)}, "v_scale must be given for a cache of int8"),
        ({"slot_mapping": torch.tensor([48])}, r"slot_mapping\[0\] must be in -1..47, got 48"),
        ({"slot_mapping": torch.tensor([0]).int()}, "slot_mapping must be int64"),
    ],
)
def test_errors(change: dict[str, Tensor], message: str) -> None:
    call = {"v_cache": torch.zeros(6, 8, 2, 8), "v_scale": None, "slot_mapping": torch.tensor([0])}
    with pytest.raises(RuntimeError, match=message):
        ops.store_value_codes(**({"codes": empty_codes(2, 8, 8)} | call | change))
