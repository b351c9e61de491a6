"""The store into the paged cache: bitwise, and nothing else may change."""

from typing import Any

import pytest
import reference
import torch
from helpers import DTYPES, Guarded, assert_bitwise, device_fixture, per_thread_count
from torch import Tensor

from fastinfer import ops

device = device_fixture("cpu")

NUM_BLOCKS = 7


def empty_caches(
    block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor]:
    """Caches of a number that no test stores, so that a write to a wrong slot shows."""
    shape = (NUM_BLOCKS, block_size, kv_heads, head_dim)
    return torch.full(shape, -77.0, dtype=dtype, device=device), torch.full(shape, 99.0, dtype=dtype, device=device)


def random_slots(tokens: int, block_size: int, device: str) -> Tensor:
    """Distinct slots, the first and the last of the cache before others in no order; every third one is -1."""
    last = NUM_BLOCKS * block_size - 1
    slots = torch.cat([torch.tensor([0, last]), torch.randperm(last - 1) + 1])[:tokens].to(device)
    slots[2::3] = -1
    return slots


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "block_size", "kv_heads", "head_dim"),
    [(0, 16, 3, 64), (1, 1, 1, 8), (2, 16, 3, 64), (7, 1, 2, 80), (19, 32, 1, 1), (99, 64, 4, 96), (19, 16, 2, 256)],
)
def test_store(
    tokens: int,
    block_size: int,
    kv_heads: int,
    head_dim: int,
    cache_dtype: torch.dtype,
    dtype: torch.dtype,
    device: str,
) -> None:
    k, v = torch.randn(2, tokens, kv_heads, head_dim, device=device).to(dtype)
    k_cache, v_cache = empty_caches(block_size, kv_heads, head_dim, cache_dtype, device)
    slots = random_slots(tokens, block_size, device)
    expected_k = reference.store_kv_cache(k, k_cache, slots)
    expected_v = reference.store_kv_cache(v, v_cache, slots)
    ops.store_kv_cache(k, v, k_cache, v_cache, slots)
    assert_bitwise(k_cache, expected_k)
    assert_bitwise(v_cache, expected_v)


@pytest.mark.parametrize("cache_dtype", DTYPES)
def test_rounding_of_special_values(cache_dtype: torch.dtype, device: str) -> None:
    """Ties to even, overflow to infinity, subnormals, signed zero, NaN: as torch converts."""
    ties = [1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 + 3 * 2.0**-11, 65519.0, 65520.0, -3.39e38]
    special = [0.0, -0.0, 1e-5, -6e-8, 2.9e-8, 3e-8, 1e-40, torch.inf, -torch.inf, torch.nan]
    values = torch.tensor(ties + special, device=device)
    k = v = values.repeat(16)[None, None, :256]
    k_cache, v_cache = empty_caches(16, 1, 256, cache_dtype, device)
    ops.store_kv_cache(k, v, k_cache, v_cache, torch.tensor([20], device=device))
    stored = k_cache[1, 4]
    assert_bitwise(stored, k[0].to(cache_dtype))
    assert_bitwise(stored.signbit() | stored.isnan(), k[0].signbit() | k[0].isnan())


def test_strided_views_of_a_fused_projection(device: str) -> None:
    k, v = Guarded(torch.randn(19, 3, 64, device=device)), Guarded(torch.randn(19, 3, 64, device=device))
    k_cache, v_cache = empty_caches(16, 3, 64, torch.bfloat16, device)
    slots = random_slots(19, 16, device)
    expected_k = reference.store_kv_cache(k.view, k_cache, slots)
    expected_v = reference.store_kv_cache(v.view, v_cache, slots)
    ops.store_kv_cache(k.view, v.view, k_cache, v_cache, slots)
    assert_bitwise(k_cache, expected_k)
    assert_bitwise(v_cache, expected_v)


def test_all_slots_skipped(device: str) -> None:
    k_cache, v_cache = empty_caches(16, 3, 64, torch.float32, device)
    k = torch.randn(5, 3, 64, device=device)
    ops.store_kv_cache(k, k, k_cache, v_cache, torch.full((5,), -1, device=device))
    assert k_cache.eq(-77).all()
    assert v_cache.eq(99).all()


def test_threads(device: str) -> None:
    k, v = torch.randn(2, 99, 3, 64, device=device)
    slots = random_slots(99, 64, device)

    def store() -> Tensor:
        caches = empty_caches(64, 3, 64, torch.float16, device)
        ops.store_kv_cache(k, v, *caches, slots)
        return torch.stack(caches)

    assert_bitwise(*per_thread_count(store))


GOOD: dict[str, Any] = {
    "k": torch.ones(3, 2, 64),
    "v": torch.ones(3, 2, 64),
    "k_cache": torch.zeros(4, 16, 2, 64),
    "v_cache": torch.zeros(4, 16, 2, 64),
    "slot_mapping": torch.arange(3),
}
BAD: dict[str, tuple[str, Tensor]] = {
    "k dtype": ("k", torch.ones(3, 2, 64).double()),
    "k 2-d": ("k", torch.ones(3, 128)),
    "k heads strided": ("k", torch.ones(3, 64, 2).transpose(1, 2)),
    "v shape": ("v", torch.ones(3, 1, 64)),
    "v dtype is not k's": ("v", torch.ones(3, 2, 64).half()),
    "k_cache head_dim": ("k_cache", torch.zeros(4, 16, 2, 32)),
    "k_cache kv_heads": ("k_cache", torch.zeros(4, 16, 3, 64)),
    "k_cache strided": ("k_cache", torch.zeros(4, 2, 16, 64).transpose(1, 2)),
    "v_cache shape": ("v_cache", torch.zeros(5, 16, 2, 64)),
    "v_cache dtype": ("v_cache", torch.zeros(4, 16, 2, 64).int()),
    "slots int32": ("slot_mapping", torch.arange(3).int()),
    "slots length": ("slot_mapping", torch.arange(4)),
    "slot past the cache": ("slot_mapping", torch.tensor([0, 64, 1])),
    "slot negative": ("slot_mapping", torch.tensor([0, 1, -2])),
}


@pytest.mark.parametrize("case", BAD)
def test_errors_name_the_argument(case: str) -> None:
    argument, value = BAD[case]
    with pytest.raises((RuntimeError, ValueError), match=rf"\b{argument}\b"):
        ops.store_kv_cache(**(GOOD | {argument: value}))
