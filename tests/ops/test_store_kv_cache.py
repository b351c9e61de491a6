"""The store into the paged cache: bitwise, and nothing else may change."""

from typing import Any

import pytest
import torch
from support import reference
from support.helpers import DTYPES, Guarded, assert_bitwise, device_fixture, per_thread_count
from support.quantized_rows import assert_quantized_rows
from torch import Tensor

from fastinfer import ops

device = device_fixture("cpu", "cuda", "emulated")

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


QUANTIZED = [torch.int8, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", QUANTIZED)
@pytest.mark.parametrize(
    ("tokens", "block_size", "kv_heads", "head_dim"),
    [(0, 16, 3, 64), (1, 1, 1, 8), (7, 1, 2, 80), (19, 32, 1, 1), (19, 64, 3, 96), (5, 16, 2, 256), (4, 16, 1, 1000)],
)
def test_quantized_store(
    tokens: int,
    block_size: int,
    kv_heads: int,
    head_dim: int,
    cache_dtype: torch.dtype,
    dtype: torch.dtype,
    device: str,
) -> None:
    k, v = (3 * torch.randn(2, tokens, kv_heads, head_dim, device=device)).to(dtype)
    k_cache, v_cache = empty_caches(block_size, kv_heads, head_dim, cache_dtype, device)
    k_scale, v_scale = torch.full((2, *k_cache.shape[:3]), -7.0, device=device)
    slots = random_slots(tokens, block_size, device)
    untouched = torch.ones(NUM_BLOCKS * block_size, dtype=torch.bool, device=device)
    untouched[slots[slots >= 0]] = False
    before = k_cache.clone(), v_cache.clone()
    given_k, given_v = (Guarded(x).view if tokens else x for x in (k, v))  # slices of a fused projection
    ops.store_kv_cache(given_k, given_v, k_cache, v_cache, slots, k_scale, v_scale)
    for x, cache, scale, old in ((k, k_cache, k_scale, before[0]), (v, v_cache, v_scale, before[1])):
        stored = slots[slots >= 0]
        values, scales = cache.flatten(0, 1), scale.flatten(0, 1)
        assert_quantized_rows(values[stored], scales[stored], x[slots >= 0].double())
        assert scales[untouched].eq(-7).all()
        assert_bitwise(values.view(torch.uint8)[untouched], old.flatten(0, 1).view(torch.uint8)[untouched])


@pytest.mark.parametrize("cache_dtype", QUANTIZED)
def test_quantized_rounding_is_that_of_torch(cache_dtype: torch.dtype, device: str) -> None:
    """With a scale of 1: every e4m3, every neighbour of a tie, both signs; every int8 and every tie."""
    if cache_dtype == torch.int8:
        x = torch.cat([torch.arange(-126.0, 127.0) + 0.5, torch.arange(-127.0, 128.0), torch.zeros(4)])
        largest = 127.0
    else:
        numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        ties = (numbers[1:] + numbers[:-1]) / 2
        x = torch.cat([numbers, ties, ties * (1 + 2**-20), ties * (1 - 2**-20), torch.zeros(7)])
        x = torch.cat([x, -x])
        largest = 448.0
    k = x.view(1, 1, -1).to(device)
    assert k.abs().max() == largest
    k_cache, v_cache = empty_caches(16, 1, k.shape[2], cache_dtype, device)
    k_scale, v_scale = torch.zeros(2, NUM_BLOCKS, 16, 1, device=device)
    ops.store_kv_cache(k, k, k_cache, v_cache, torch.tensor([20], device=device), k_scale, v_scale)
    expected = k.round().to(torch.int8) if cache_dtype == torch.int8 else k.to(cache_dtype)
    assert k_scale[1, 4] == 1
    for cache in (k_cache, v_cache):
        assert_bitwise(cache[1, 4].view(torch.uint8), expected[0].view(torch.uint8))


@pytest.mark.parametrize("cache_dtype", QUANTIZED)
def test_quantized_special_rows(cache_dtype: torch.dtype, device: str) -> None:
    k = torch.randn(6, 2, 40, device=device)
    k[0, 0], k[1, 0], k[2, 0] = 0, -0.0, k[2, 0] * 1e-38
    k[3, 0, 39], k[4, 0, 0], k[5, 0, 7] = torch.nan, torch.inf, -torch.inf
    caches = empty_caches(1, 2, 40, cache_dtype, device)
    scales = torch.full((2, NUM_BLOCKS, 1, 2), -7.0, device=device)
    ops.store_kv_cache(k, k, *caches, torch.arange(6, device=device), scales[0], scales[1])
    for cache, scale in zip(caches, scales, strict=True):
        assert cache[:6, 0, 0].view(torch.uint8).eq(0).all()
        assert scale[:3, 0, 0].eq(0).all()
        assert scale[3:6, 0, 0].isnan().all()
        assert_quantized_rows(cache[:6, 0, 1], scale[:6, 0, 1], k[:, 1].double())


def int4_scales(cache: Tensor, head_dim: int) -> list[Tensor]:
    """Of keys and values; numbers that no test stores."""
    groups = (-(-head_dim // size) for size in reference.INT4_GROUPS)
    return [torch.full((*cache.shape[:3], count, 2), -7.0, device=cache.device).half() for count in groups]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "block_size", "kv_heads", "head_dim"),
    [
        (0, 16, 3, 64),
        (1, 1, 1, 8),
        (7, 1, 2, 80),
        (19, 32, 1, 2),
        (9, 16, 2, 34),
        (19, 64, 3, 96),
        (5, 16, 2, 256),
        (4, 16, 1, 1000),
    ],
)
def test_int4_store(
    tokens: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: str
) -> None:
    k, v = 3 * torch.randn(2, tokens, kv_heads, head_dim, device=device)
    k[..., head_dim // 2] += 40  # as keys have it
    k, v = k.to(dtype), v.to(dtype)
    caches = torch.full((2, NUM_BLOCKS, block_size, kv_heads, head_dim // 2), 77, dtype=torch.uint8, device=device)
    scales = int4_scales(caches[0], head_dim)
    slots = random_slots(tokens, block_size, device)
    untouched = torch.ones(NUM_BLOCKS * block_size, dtype=torch.bool, device=device)
    untouched[slots[slots >= 0]] = False
    given_k, given_v = (Guarded(x).view if tokens else x for x in (k, v))
    ops.store_kv_cache(given_k, given_v, *caches, slots, *scales)
    for x, cache, scale, size in zip((k, v), caches.flatten(1, 2), scales, reference.INT4_GROUPS, strict=True):
        codes, pairs = reference.quantize_int4(x[slots >= 0], size)
        assert_bitwise(cache[slots[slots >= 0]], codes)
        scale = scale.flatten(0, 1)
        assert_bitwise(scale[slots[slots >= 0]], pairs)
        assert cache[untouched].eq(77).all()
        assert scale[untouched].eq(-7).all()
        step, amax = pairs[..., :1].amax(-2).double(), x[slots >= 0].double().abs().amax(-1, keepdim=True)
        error = reference.dequantize_int4(codes, pairs, size) - x[slots >= 0].double()
        assert (error.abs() <= 0.51 * step + 2**-11 * amax).all()


def test_int4_special_groups(device: str) -> None:
    """The other groups are ordinary ones, and stay so."""
    k = torch.randn(12, 1, 128, device=device)
    zeros, constant, overflow = slice(0, 3), slice(3, 5), slice(5, 12)
    k[0, 0, :64], k[1, 0, :64], k[2, 0, :64] = 0, -0.0, k[2, 0, :64] * 1e-38
    k[3, 0, :64], k[4, 0, :64] = 0.1, 0.3  # which fp16 rounds down and up
    k[5, 0, 15], k[6, 0, 0], k[7, 0, 7], k[8, 0, 3], k[9, 0, 3] = torch.nan, torch.inf, -torch.inf, 7e4, -7e4
    k[10, 0, 3], k[11, 0, 3] = -65510, 65500  # fp16 rounds the minimum into its range, and the scale beyond
    caches = torch.full((2, NUM_BLOCKS, 16, 1, 64), 77, dtype=torch.uint8, device=device)
    scales = int4_scales(caches[0], 128)
    ops.store_kv_cache(k, k, *caches, torch.arange(12, device=device), *scales)
    for cache, scale, size in zip(caches[:, 0, :12, 0], scales, reference.INT4_GROUPS, strict=True):
        scale = scale[0, :12, 0]
        codes, pairs = reference.quantize_int4(k[:, 0], size)
        assert cache[[*range(3), *range(5, 12)], : size // 2].eq(0).all()
        assert scale[zeros, 0].eq(0).all()
        shown = reference.dequantize_int4(cache, scale, size)[constant, :64]
        assert (shown - k[constant, 0, :64]).abs().max() < 5e-5
        assert scale[overflow, 0].isnan().all()
        assert scale[:, 1:].isfinite().all()
        assert_bitwise(cache, codes)
        assert_bitwise(scale, pairs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_slots_outside_the_cache(dtype: torch.dtype, device: str, request: pytest.FixtureRequest) -> None:
    """Refused where the host can look, else not written."""
    k = torch.ones(4, 2, 64, device=device)
    caches = empty_caches(16, 2, 64, dtype, device)
    scales = torch.full((2, NUM_BLOCKS, 16, 2), -7.0, device=device) if dtype == torch.int8 else ()
    slots = torch.tensor([3, NUM_BLOCKS * 16, 2**62, -5], device=device)
    if request.node.callspec.params["device"] == "cpu":
        with pytest.raises(RuntimeError, match=r"slot_mapping\[1\]"):
            ops.store_kv_cache(k, k, *caches, slots, *scales)
        return
    ops.store_kv_cache(k, k, *caches, slots, *scales)
    for cache, empty in zip(caches, (-77, 99), strict=True):
        changed = cache.float().ne(empty).flatten(0, 1).any(2).any(1)
        assert changed.nonzero().tolist() == [[3]]


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
    "k_scale for a cache of floats": ("k_scale", torch.zeros(4, 16, 2)),
    "v_scale for a cache of floats": ("v_scale", torch.zeros(4, 16, 2)),
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


SCALE = torch.zeros(4, 16, 2)
BAD_SCALES: dict[str, tuple[str, Tensor | None, Tensor | None]] = {
    "k_scale missing": ("k_scale", None, SCALE),
    "v_scale missing": ("v_scale", SCALE, None),
    "k_scale shape": ("k_scale", torch.zeros(4, 16), SCALE),
    "v_scale dtype": ("v_scale", SCALE, SCALE.half()),
    "v_scale strided": ("v_scale", SCALE, torch.zeros(4, 2, 16).transpose(1, 2)),
}


INT4_SCALES = {"k_scale": torch.zeros(4, 16, 2, 4, 2).half(), "v_scale": torch.zeros(4, 16, 2, 1, 2).half()}
BAD_INT4: dict[str, tuple[str, dict[str, Tensor | None]]] = {
    "odd head": ("k", {"k": torch.ones(3, 2, 63), "v": torch.ones(3, 2, 63)}),
    "k_cache not packed": ("k_cache", {"k_cache": torch.zeros(4, 16, 2, 64, dtype=torch.uint8)}),
    "k_scale missing": ("k_scale", {"k_scale": None}),
    "k_scale of int8": ("k_scale", {"k_scale": SCALE}),
    "v_scale dtype": ("v_scale", {"v_scale": INT4_SCALES["v_scale"].float()}),
    "v_scale groups": ("v_scale", {"v_scale": INT4_SCALES["k_scale"]}),
    "v_scale alignment": ("v_scale must be aligned", {"v_scale": torch.zeros(257).half()[1:].view(4, 16, 2, 1, 2)}),
}


@pytest.mark.parametrize("case", BAD_INT4)
def test_int4_errors_name_the_argument(case: str) -> None:
    argument, values = BAD_INT4[case]
    caches = {name: torch.zeros(4, 16, 2, 32, dtype=torch.uint8) for name in ("k_cache", "v_cache")}
    with pytest.raises(RuntimeError, match=rf"\b{argument}\b"):
        ops.store_kv_cache(**(GOOD | caches | INT4_SCALES | values))


@pytest.mark.parametrize("case", BAD_SCALES)
def test_scale_errors_name_the_argument(case: str) -> None:
    argument, k_scale, v_scale = BAD_SCALES[case]
    k_cache, v_cache = torch.zeros(2, 4, 16, 2, 64, dtype=torch.int8)
    with pytest.raises(RuntimeError, match=rf"\b{argument}\b"):
        ops.store_kv_cache(GOOD["k"], GOOD["v"], k_cache, v_cache, GOOD["slot_mapping"], k_scale, v_scale)
