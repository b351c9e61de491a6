"""Bounds of pages: they hold, they are tight, and only pages whose last slots are written have new ones."""

import pytest
import torch
from support import reference
from support.helpers import DTYPES, assert_bitwise, device_fixture
from torch import Tensor

from fastinfer import ops

BLOCKS = 6


device = device_fixture("cpu", "cuda", "emulated")


def empty_bounds(heads: int, head_dim: int, device: str = "cpu") -> Tensor:
    return torch.full((BLOCKS, heads, 2, head_dim), -77.0, dtype=torch.bfloat16, device=device)


def expected_bounds(keys: Tensor) -> Tensor:
    """The nearest numbers of bf16 that are not within the range of the keys [blocks, block_size, heads, head_dim]."""
    least, largest = keys.float().amin(1), keys.float().amax(1)
    return torch.stack([-above(-least), above(largest)], 2)


def above(x: Tensor) -> Tensor:
    """x rounded up to bf16, for finite numbers that are no subnormals."""
    bits = x.view(torch.int32)
    is_exact = (bits & 0xFFFF) == 0
    truncated = (bits & -0x10000).view(torch.float32).bfloat16()
    away = ((bits & -0x10000) + 0x10000).view(torch.float32).bfloat16()
    return torch.where(is_exact | (x < 0), truncated, away)


SHAPES = [(16, 3, 64), (1, 1, 8), (32, 1, 80), (5, 7, 256)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("block_size", "heads", "head_dim"), SHAPES)
def test_bounds(block_size: int, heads: int, head_dim: int, dtype: torch.dtype, device: str) -> None:
    keys = torch.randn(BLOCKS, block_size, heads, head_dim, device=device).to(dtype)
    keys[4] = keys[4].abs()
    keys[5] = -keys[5].abs()
    bounds = empty_bounds(heads, head_dim, device)
    ops.store_page_bounds(bounds, keys, None, torch.arange(BLOCKS * block_size, device=device).flip(0))
    assert_bitwise(bounds, expected_bounds(keys))


def test_a_head_size_that_is_no_multiple_of_8() -> None:
    torch.manual_seed(0)
    keys, bounds = torch.randn(BLOCKS, 5, 2, 13), empty_bounds(2, 13)
    ops.store_page_bounds(bounds, keys, None, torch.arange(BLOCKS * 5))
    assert_bitwise(bounds, expected_bounds(keys))


@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn, torch.uint8])
def test_quantised_keys(cache_dtype: torch.dtype, device: str) -> None:
    block_size, heads, head_dim = 16, 3, 80
    k = torch.randn(BLOCKS * block_size, heads, head_dim, device=device)
    columns = head_dim // 2 if cache_dtype == torch.uint8 else head_dim
    groups = (5, 2), (2, 2)
    caches = torch.zeros(2, BLOCKS, block_size, heads, columns, device=device).to(cache_dtype).unbind()
    if cache_dtype == torch.uint8:
        scales = [torch.zeros(BLOCKS, block_size, heads, *group, device=device).half() for group in groups]
    else:
        scales = [torch.zeros(BLOCKS, block_size, heads, device=device) for _ in groups]
    slots = torch.arange(len(k), device=device)
    ops.store_kv_cache(k, k, *caches, slots, *scales)
    bounds = empty_bounds(heads, head_dim, device)
    ops.store_page_bounds(bounds, caches[0], scales[0], slots)
    if cache_dtype == torch.uint8:
        keys = reference.dequantize_int4(caches[0], scales[0], 16)
    else:
        keys = caches[0].double() * scales[0].double()[..., None]
    least, largest = bounds.double().unbind(2)
    slack = 1e-6 * keys.abs().max()  # dequantised in fp32
    assert (least <= keys.amin(1) + slack).all()
    assert (largest >= keys.amax(1) - slack).all()
    step = 2.0**-7 * keys.abs().amax((1, 3))[..., None]  # of bf16
    assert (keys.amin(1) - least <= step).all()
    assert (largest - keys.amax(1) <= step).all()


def test_only_pages_whose_last_slots_are_written(device: str) -> None:
    keys = torch.randn(BLOCKS, 4, 2, 8, device=device)
    bounds = empty_bounds(2, 8, device)
    ops.store_page_bounds(bounds, keys, None, torch.tensor([8, 9, 10, -1, 15, 0, 22], device=device))
    expected = empty_bounds(2, 8, device)
    expected[3] = expected_bounds(keys)[3]
    assert_bitwise(bounds, expected)
    keys[3] = 5.0  # the tokens that were there have been rejected
    ops.store_page_bounds(bounds, keys, None, torch.tensor([14, 15], device=device))
    assert (bounds[3] == 5.0).all()


def test_a_nan_shows_in_its_own_channel(device: str) -> None:
    """Also a NaN whose upper half, as bf16, is infinity."""
    keys = torch.randn(BLOCKS, 4, 2, 8, device=device)
    keys.view(torch.int32)[2, 1, 1, 3] = 0x7F800001
    bounds, slots = empty_bounds(2, 8, device), torch.arange(24, device=device)
    ops.store_page_bounds(bounds, keys, None, slots)
    assert bounds[2, 1, :, 3].isnan().all()
    assert bounds.isnan().sum() == 2
    keys[2, 1, 1, 3] = torch.inf
    ops.store_page_bounds(bounds, keys, None, slots)
    assert bounds[2, 1, 1, 3] == torch.inf
    assert bounds[2, 1, 0, 3] == expected_bounds(keys)[2, 1, 0, 3]


@pytest.mark.emulated
@pytest.mark.parametrize("device", ["emulated"], indirect=True)
def test_a_gpu_reads_the_scales_of_4_bit_keys_in_pairs(device: str) -> None:
    keys = torch.zeros(BLOCKS, 4, 2, 32, dtype=torch.uint8, device=device)
    scales = torch.zeros(BLOCKS * 4 * 2 * 8 + 1, dtype=torch.float16, device=device)[1:].view(BLOCKS, 4, 2, 4, 2)
    with pytest.raises(RuntimeError, match="k_scale must be aligned to 4 bytes"):
        ops.store_page_bounds(
            empty_bounds(2, 64, device), keys, scales, torch.zeros(1, dtype=torch.int64, device=device)
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bounds": torch.zeros(6, 2, 2, 8)}, "bounds must be bfloat16, got float32"),
        ({"bounds": torch.zeros(6, 2, 3, 8).bfloat16()}, "bounds must have the shape"),
        ({"k_cache": torch.zeros(5, 4, 2, 8)}, "k_cache must have the shape"),
        ({"k_cache": torch.zeros(6, 0, 2, 8)}, r"k_cache must have a block size and a head size, got \[6, 0, 2, 8\]"),
        ({"k_scale": torch.zeros(6, 4, 2)}, "k_scale must be given for a cache of int8"),
        ({"slot_mapping": torch.tensor([24])}, r"slot_mapping\[0\] must be in -1..23, got 24"),
        ({"slot_mapping": torch.tensor([0]).int()}, "slot_mapping must be int64"),
    ],
)
def test_errors(change: dict[str, Tensor], message: str) -> None:
    call = {"k_cache": torch.zeros(6, 4, 2, 8), "k_scale": None, "slot_mapping": torch.tensor([0])}
    with pytest.raises(RuntimeError, match=message):
        ops.store_page_bounds(**({"bounds": empty_bounds(2, 8)} | call | change))
