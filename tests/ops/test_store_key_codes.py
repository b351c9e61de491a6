"""Keys in four bits: the nearest levels of the rotated key, for each slot that is written and no other."""

import pytest
import torch
from support import reference
from support.helpers import DTYPES, assert_bitwise, device_fixture
from torch import Tensor

from fastinfer import ops

BLOCKS = 6


device = device_fixture("cpu", "cuda", "emulated")


def empty_codes(heads: int, head_dim: int, block_size: int, device: str = "cpu") -> Tensor:
    return torch.full((BLOCKS, heads, head_dim // 8 + 1, block_size), -77, dtype=torch.int32, device=device)


def assert_codes(codes: Tensor, keys: Tensor) -> None:
    """Codes of keys [blocks, block_size, heads, head_dim]."""
    reference.assert_nearest_levels(*reference.key_levels(codes), keys)


SHAPES = [(16, 3, 64), (1, 1, 8), (32, 1, 80), (5, 7, 256), (8, 2, 24), (3, 2, 512), (4, 1, 48)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("block_size", "heads", "head_dim"), SHAPES)
def test_codes(block_size: int, heads: int, head_dim: int, dtype: torch.dtype, device: str) -> None:
    keys = torch.randn(BLOCKS, block_size, heads, head_dim, device=device).to(dtype)
    keys[3, :, :, 5] *= 100  # a channel that is much larger
    keys[4] = 0.0
    codes = empty_codes(heads, head_dim, block_size, device)
    ops.store_key_codes(codes, keys, None, torch.arange(BLOCKS * block_size, device=device).flip(0))
    assert_codes(codes, keys)


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
    codes = empty_codes(heads, head_dim, block_size, device)
    ops.store_key_codes(codes, caches[0], scales[0], slots)
    if cache_dtype == torch.uint8:
        keys = reference.dequantize_int4(caches[0], scales[0], 16)
    else:
        keys = caches[0].double() * scales[0].double()[..., None]
    assert_codes(codes, keys)


def test_only_slots_that_are_written(device: str) -> None:
    keys = torch.randn(BLOCKS, 4, 2, 8, device=device)
    codes = empty_codes(2, 8, 4, device)
    ops.store_key_codes(codes, keys, None, torch.tensor([8, 9, -1, 22], device=device))
    expected = empty_codes(2, 8, 4, device)
    every = empty_codes(2, 8, 4, device)
    ops.store_key_codes(every, keys, None, torch.arange(24, device=device))
    expected[2, :, :, :2], expected[5, :, :, 2] = every[2, :, :, :2], every[5, :, :, 2]
    assert_bitwise(codes, expected)
    keys[2, 1] = 5.0  # the token that was there has been rejected
    ops.store_key_codes(codes, keys, None, torch.tensor([9], device=device))
    assert_codes(codes[2:3, :, :, :2].contiguous(), keys[2:3, :2])


def test_what_is_not_finite_and_what_is_too_small_show_in_the_scale(device: str) -> None:
    keys = torch.randn(BLOCKS, 4, 2, 24, device=device)
    keys[0, 0, 0, 3], keys[0, 1, 0, 3], keys[0, 2, 0, 3] = torch.nan, torch.inf, -torch.inf
    keys[0, 3, 0] = 3e38  # the sum is too large
    keys[1, 0, 0] = 1e-41
    codes = empty_codes(2, 24, 4, device)
    ops.store_key_codes(codes, keys, None, torch.arange(24, device=device))
    _, scales = reference.key_levels(codes)
    assert scales[0, :, 0].isnan().all()
    assert scales.isnan().sum() == 4
    assert scales[1, 0, 0] == 0.0
    assert (scales == 0).sum() == 1


@pytest.mark.emulated
@pytest.mark.parametrize("device", ["emulated"], indirect=True)
def test_a_gpu_reads_the_scales_of_4_bit_keys_in_pairs(device: str) -> None:
    keys = torch.zeros(BLOCKS, 4, 2, 32, dtype=torch.uint8, device=device)
    scales = torch.zeros(BLOCKS * 4 * 2 * 8 + 1, dtype=torch.float16, device=device)[1:].view(BLOCKS, 4, 2, 4, 2)
    with pytest.raises(RuntimeError, match="k_scale must be aligned to 4 bytes"):
        ops.store_key_codes(
            empty_codes(2, 64, 4, device), keys, scales, torch.zeros(1, dtype=torch.int64, device=device)
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"codes": torch.zeros(6, 2, 2, 4)}, "codes must be int32, got float32"),
        (
            {"codes": torch.zeros(6, 2, 1, 4).int()},
            r"codes must have a block size and at least two words, got \[6, 2, 1",
        ),
        (
            {"codes": torch.zeros(6, 2, 2, 0).int()},
            r"codes must have a block size and at least two words, got \[6, 2, 2",
        ),
        ({"k_cache": torch.zeros(5, 4, 2, 8)}, "k_cache must have the shape"),
        ({"k_cache": torch.zeros(6, 4, 2, 12)}, "k_cache must have the shape"),
        ({"k_scale": torch.zeros(6, 4, 2)}, "k_scale must be given for a cache of int8"),
        ({"slot_mapping": torch.tensor([24])}, r"slot_mapping\[0\] must be in -1..23, got 24"),
        ({"slot_mapping": torch.tensor([0]).int()}, "slot_mapping must be int64"),
    ],
)
def test_errors(change: dict[str, Tensor], message: str) -> None:
    call = {"k_cache": torch.zeros(6, 4, 2, 8), "k_scale": None, "slot_mapping": torch.tensor([0])}
    with pytest.raises(RuntimeError, match=message):
        ops.store_key_codes(**({"codes": empty_codes(2, 8, 4)} | call | change))
