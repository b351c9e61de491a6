import io
import os

import pytest
import torch

from fastinfer.engine.kv_cache import KVCache
from fastinfer.engine.kv_tensors import (
    QUANTIZED_DTYPES,
    KVCacheTensors,
    available_memory,
    default_num_blocks,
    num_blocks_for,
    token_bytes,
)
from fastinfer.engine.sequence import Sequence
from fastinfer.errors import RequestError
from fastinfer.sampling_params import SamplingParams


def sequence(num_tokens: int) -> Sequence:
    return Sequence("r", list(range(num_tokens)), SamplingParams(), seed=0)


@pytest.mark.parametrize(("num_tokens", "blocks"), [(1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_allocate_takes_whole_blocks_and_free_gives_them_back(num_tokens: int, blocks: int) -> None:
    cache = KVCache(num_blocks=3, block_size=4)
    tokens = sequence(num_tokens)
    assert cache.can_allocate(tokens)
    cache.allocate(tokens)
    assert len(tokens.blocks) == cache.num_used == blocks
    assert cache.num_free == 3 - blocks
    cache.free(tokens)
    cache.free(tokens)
    assert (cache.num_free, cache.num_used, tokens.blocks) == (3, 0, [])


def test_can_allocate_counts_the_spare_blocks() -> None:
    cache = KVCache(num_blocks=3, block_size=4)
    assert not cache.can_allocate(sequence(13))
    assert cache.can_allocate(sequence(8), spare=1)
    assert not cache.can_allocate(sequence(9), spare=1)


def test_append_takes_a_block_only_at_a_border() -> None:
    cache = KVCache(num_blocks=2, block_size=4)
    tokens = sequence(3)
    cache.allocate(tokens)
    for used in (1, 2, 2, 2, 2):
        tokens.token_ids.append(0)
        assert cache.can_append(tokens)
        cache.append(tokens)
        assert cache.num_used == used
    tokens.token_ids.append(0)
    assert not cache.can_append(tokens)


def test_two_sequences_never_share_a_block() -> None:
    cache = KVCache(num_blocks=5, block_size=2)
    first, second = sequence(4), sequence(5)
    cache.allocate(first)
    cache.allocate(second)
    assert sorted(first.blocks + second.blocks) == [0, 1, 2, 3, 4]


def test_freed_blocks_are_used_before_untouched_memory() -> None:
    cache = KVCache(num_blocks=100, block_size=1)
    for _ in range(20):
        tokens = sequence(3)
        cache.allocate(tokens)
        assert tokens.blocks == [0, 1, 2]
        cache.free(tokens)


def compute(cache: KVCache, tokens: Sequence) -> None:
    """What a step does: all tokens are in the cache now."""
    tokens.num_computed_tokens = len(tokens)
    cache.commit(tokens)


def check(cache: KVCache, free: int, cached: int, used: int) -> None:
    assert (cache.num_free, cache.num_cached, cache.num_used) == (free, cached, used)
    assert free + cached + used == cache.num_blocks


def test_fork_shares_all_blocks_until_both_are_gone() -> None:
    cache = KVCache(num_blocks=5, block_size=4)
    parent, child = sequence(10), sequence(10)
    cache.allocate(parent)
    compute(cache, parent)
    cache.fork(parent, child)
    assert child.blocks == parent.blocks == [0, 1, 2]
    assert child.blocks is not parent.blocks
    assert child.num_computed_tokens == 10
    check(cache, 2, 0, 3)
    cache.free(parent)
    check(cache, 2, 0, 3)
    cache.free(child)
    check(cache, 3, 2, 0)


def test_the_first_to_write_into_a_shared_block_gets_a_copy() -> None:
    cache = KVCache(num_blocks=5, block_size=4)
    parent, child = sequence(10), sequence(10)
    cache.allocate(parent)
    compute(cache, parent)
    cache.fork(parent, child)
    known = parent.blocks
    for each in (parent, child):
        each.token_ids.append(7)
        assert cache.can_append(each)
        cache.append(each)
    assert parent.blocks == [0, 1, 3]
    assert parent.blocks is not known, "whoever has copied the list must see that it changed"
    assert child.blocks == [0, 1, 2]
    assert cache.copies == [(2, 3)]
    check(cache, 1, 0, 4)
    cache.free(parent)
    cache.free(child)
    check(cache, 3, 2, 0)


def test_forks_that_go_on_differently_are_both_found() -> None:
    cache = KVCache(num_blocks=20, block_size=4)
    parent, child = sequence(10), sequence(10)
    cache.allocate(parent)
    compute(cache, parent)
    cache.fork(parent, child)
    for token, each in enumerate((parent, child), 50):
        each.token_ids += [token] * 3
        cache.append(each)
        compute(cache, each)
    for each in (parent, child):
        cache.free(each)
        again = Sequence("r", list(each.token_ids), SamplingParams(), seed=0)
        cache.allocate(again)
        assert again.num_computed_tokens == 12
        cache.free(again)


def test_all_of_a_preempted_text_is_prefill() -> None:
    cache = KVCache(num_blocks=20, block_size=4, enable_prefix_caching=False)
    tokens = sequence(6)
    cache.allocate(tokens)
    compute(cache, tokens)
    tokens.token_ids += [1, 2, 3]
    assert tokens.is_decoding
    cache.free(tokens)
    cache.allocate(tokens)
    tokens.num_computed_tokens = 8
    assert not tokens.is_decoding
    tokens.num_computed_tokens = 9
    assert tokens.is_decoding


def test_a_copy_needs_a_free_block() -> None:
    cache = KVCache(num_blocks=3, block_size=4)
    parent, child = sequence(10), sequence(10)
    cache.allocate(parent)
    compute(cache, parent)
    cache.fork(parent, child)
    parent.token_ids.append(7)
    assert not cache.can_append(parent)
    cache.free(child)
    assert cache.can_append(parent)
    cache.append(parent)
    assert (parent.blocks, cache.copies) == ([0, 1, 2], [])


def test_a_fork_at_a_border_copies_nothing() -> None:
    cache = KVCache(num_blocks=4, block_size=4)
    parent, child = sequence(8), sequence(8)
    cache.allocate(parent)
    compute(cache, parent)
    cache.fork(parent, child)
    for each in (parent, child):
        each.token_ids.append(7)
        cache.append(each)
    assert (parent.blocks, child.blocks, cache.copies) == ([0, 1, 2], [0, 1, 3], [])


def test_blocks_reserved_for_drafts_are_not_forked() -> None:
    cache = KVCache(num_blocks=9, block_size=4)
    parent, child = sequence(7), sequence(7)
    cache.allocate(parent)
    compute(cache, parent)
    parent.token_ids.append(7)
    cache.append(parent, num_drafts=6)
    assert len(parent.blocks) == 4
    cache.fork(parent, child)
    assert child.blocks == parent.blocks[:2]


@pytest.mark.parametrize(("num_tokens", "hits"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (13, 3), (30, 3)])
def test_prefixes_are_found_in_full_blocks_and_a_token_is_left(num_tokens: int, hits: int) -> None:
    cache = KVCache(num_blocks=20, block_size=4)
    first = sequence(14)
    cache.allocate(first)
    compute(cache, first)
    blocks = list(first.blocks)
    cache.free(first)
    check(cache, 17, 3, 0)
    second = sequence(num_tokens)
    cache.allocate(second)
    assert second.blocks[:hits] == blocks[:hits]
    assert second.num_computed_tokens == 4 * hits
    assert (cache.num_hit_tokens, cache.num_queried_tokens) == (4 * hits, 14 + num_tokens)
    assert cache.num_used == num_blocks_for(num_tokens, 4)
    assert not set(second.blocks[hits:]) & set(blocks[:hits])


def test_what_is_not_computed_is_not_found() -> None:
    cache = KVCache(num_blocks=20, block_size=4)
    first, second = sequence(12), sequence(12)
    cache.allocate(first)
    first.num_computed_tokens = 7
    cache.commit(first)
    cache.allocate(second)
    assert second.num_computed_tokens == 4


def test_a_token_that_differs_ends_the_prefix() -> None:
    cache = KVCache(num_blocks=20, block_size=4)
    first, second = sequence(13), sequence(13)
    second.token_ids[5] = 99
    cache.allocate(first)
    compute(cache, first)
    cache.allocate(second)
    assert second.num_computed_tokens == 4


@pytest.mark.parametrize("kind", ["salt", "adapter", "off for the sequence", "off"])
def test_who_may_not_share(kind: str) -> None:
    cache = KVCache(num_blocks=20, block_size=4, enable_prefix_caching=kind != "off")
    other = {
        "salt": {"cache_salt": "b"},
        "adapter": {"adapter_key": "b"},
        "off for the sequence": {"reads_prefix": False},
    }
    first = sequence(13)
    second = Sequence("r", list(range(13)), SamplingParams(), seed=0, **other.get(kind, {}))  # type: ignore[arg-type]
    for each in (first, second):
        cache.allocate(each)
        assert each.num_computed_tokens == 0
        compute(cache, each)
        cache.free(each)
    assert cache.num_cached == {"off": 0, "off for the sequence": 3}.get(kind, 6)


def test_tokens_are_compared_and_a_hash_alone_proves_nothing() -> None:
    cache = KVCache(num_blocks=20, block_size=4)
    first, second = sequence(9), sequence(9)
    cache.allocate(first)
    compute(cache, first)
    second.token_ids[0] = 99
    second.block_keys = list(first.block_keys)  # as if both texts had the same hash
    cache.allocate(second)
    assert second.num_computed_tokens == 0


def test_the_least_recently_used_block_goes_first_and_ends_before_beginnings() -> None:
    cache = KVCache(num_blocks=6, block_size=1)
    old, new = sequence(3), Sequence("r", [50, 51, 52], SamplingParams(), seed=0)
    for each in (old, new):
        cache.allocate(each)
        compute(cache, each)
    cache.free(old)
    cache.free(new)
    check(cache, 0, 6, 0)

    def prefix(tokens: list[int]) -> int:
        return len(cache._find_prefix(Sequence("r", [*tokens, 0], SamplingParams(), seed=0)))

    lengths = []
    for _ in range(6):
        cache._take()
        lengths.append((prefix([0, 1, 2]), prefix([50, 51, 52])))
    assert lengths == [(2, 3), (1, 3), (0, 3), (0, 2), (0, 1), (0, 0)]


def test_a_hit_makes_a_block_new_again() -> None:
    cache = KVCache(num_blocks=4, block_size=1)
    first, second = Sequence("r", [1], SamplingParams(), seed=0), Sequence("r", [2], SamplingParams(), seed=0)
    for each in (first, second):
        cache.allocate(each)
        compute(cache, each)
        cache.free(each)
    again = Sequence("r", [1, 3], SamplingParams(), seed=0)
    cache.allocate(again)
    assert again.num_computed_tokens == 1
    cache.free(again)
    oldest = cache._by_key[second.block_keys[0]]
    assert list(cache._cached) == [oldest, cache._by_key[first.block_keys[0]]]
    for _ in range(2):
        cache._take()
    assert cache._take() == oldest


def test_hits_that_nobody_holds_are_not_counted_as_room() -> None:
    cache = KVCache(num_blocks=3, block_size=4)
    first = sequence(9)
    cache.allocate(first)
    compute(cache, first)
    cache.free(first)
    check(cache, 1, 2, 0)
    assert cache.can_allocate(sequence(12))
    assert not cache.can_allocate(sequence(12), spare=1)
    assert not cache.can_allocate(sequence(13))


def test_two_that_compute_the_same_at_the_same_time() -> None:
    cache = KVCache(num_blocks=8, block_size=4)
    first, second = sequence(8), sequence(8)
    for each in (first, second):
        cache.allocate(each)
    for each in (first, second):
        compute(cache, each)
    cache.free(first)
    cache.free(second)
    check(cache, 6, 2, 0)


def test_reset_forgets_the_contents_and_keeps_the_sequences() -> None:
    cache = KVCache(num_blocks=8, block_size=4)
    first, second = sequence(8), Sequence("r", [9] * 8, SamplingParams(), seed=0)
    for each in (first, second):
        cache.allocate(each)
        compute(cache, each)
    cache.free(first)
    check(cache, 4, 2, 2)
    cache.reset_prefix_cache()
    check(cache, 6, 0, 2)
    cache.free(second)
    check(cache, 8, 0, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8, torch.float8_e4m3fn, torch.uint8])
def test_tensors_have_their_own_memory_in_every_layer(dtype: torch.dtype) -> None:
    tensors = KVCacheTensors.empty(3, 5, 4, 2, 80, dtype, "cpu")
    assert len(tensors.layers) == 3
    every = [tensor for cache in tensors for tensor in cache.tensors]
    quantised = dtype in QUANTIZED_DTYPES
    assert len({tensor.data_ptr() for tensor in every}) == len(every) == (12 if quantised else 6)
    for cache in tensors:
        assert cache.k.shape == cache.v.shape == (5, 4, 2, 40 if dtype == torch.uint8 else 80)
        assert cache.k.dtype == cache.v.dtype == dtype
        if quantised:
            assert cache.k_scale is not None
            assert cache.v_scale is not None
            assert cache.k_scale.shape == (5, 4, 2, *((5, 2) if dtype == torch.uint8 else ()))
            assert cache.v_scale.shape == (5, 4, 2, *((2, 2) if dtype == torch.uint8 else ()))
    assert sum(tensor.nbytes for tensor in every) == 5 * 4 * token_bytes(3, 2, 80, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.uint8])
def test_copied_blocks(dtype: torch.dtype) -> None:
    tensors = KVCacheTensors.empty(2, 6, 4, 2, 8, dtype, "cpu")
    every = [tensor for cache in tensors for tensor in cache.tensors]
    for index, tensor in enumerate(every):
        numbers = 99 * torch.rand(tensor.shape, generator=torch.Generator().manual_seed(index))
        tensor.copy_(numbers.to(tensor.dtype))
    before = [tensor.float().clone() for tensor in every]
    tensors.copy_blocks([(0, 3), (3, 1)])  # all is read before anything is written
    for tensor, old in zip(every, before, strict=True):
        assert torch.equal(tensor.float(), old[[0, 3, 2, 0, 4, 5]])


def test_two_elements_share_a_byte() -> None:
    with pytest.raises(RequestError, match="even head_dim, got 9"):
        KVCacheTensors.empty(1, 2, 4, 1, 9, torch.uint8, "cpu")


def test_available_memory_is_what_linux_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"/proc/meminfo": "MemTotal:       24000000 kB\nMemFree:  10 kB\nMemAvailable:   16000007 kB\n"}

    def opened(path: str) -> io.StringIO:
        if path not in files:
            raise FileNotFoundError(path)
        return io.StringIO(files[path])

    monkeypatch.setattr("builtins.open", opened)
    reported = available_memory("cpu")
    files["/proc/meminfo"] = "MemTotal:       24000000 kB\n"  # as before Linux 3.14
    total_without_field = available_memory("cpu")
    files.clear()
    total_without_file = available_memory("cpu")
    monkeypatch.undo()
    assert reported == 16000007 * 1024
    assert total_without_field == total_without_file == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_default_size() -> None:
    def blocks(max_model_len: int, available_bytes: int) -> int:
        return default_num_blocks(32, 1000, max_model_len, max_num_seqs=4, available_bytes=available_bytes)

    assert blocks(100, 10**9) == 4 * num_blocks_for(100, 32)
    assert blocks(100_000, 10**9) == num_blocks_for(100_000, 32)  # one long sequence, more than four of 2,048
    assert blocks(100, 40_000) == 10  # a quarter of the memory
    assert blocks(4096, 10**9) == 4 * 2048 // 32
