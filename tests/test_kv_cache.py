import pytest
import torch

from fastinfer.engine.kv_cache import KVCache, KVCacheTensors, available_memory, default_num_blocks, num_blocks_for
from fastinfer.engine.sequence import Sequence
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


def test_fork_shares_full_computed_blocks_until_both_are_gone() -> None:
    cache = KVCache(num_blocks=4, block_size=4)
    parent, child = sequence(10), sequence(10)
    cache.allocate(parent)
    parent.num_computed_tokens = 10
    cache.fork(parent, child)
    assert child.blocks == parent.blocks[:2]
    assert child.num_computed_tokens == 8
    cache.allocate(child)
    assert child.blocks[2] != parent.blocks[2]
    assert (cache.num_used, cache.num_free) == (4, 0)
    cache.free(parent)
    assert (cache.num_used, cache.num_free) == (3, 1)
    cache.free(child)
    assert (cache.num_used, cache.num_free) == (0, 4)


def test_a_fork_leaves_the_last_token_to_compute() -> None:
    cache = KVCache(num_blocks=4, block_size=4)
    parent, child = sequence(8), sequence(8)
    cache.allocate(parent)
    parent.num_computed_tokens = 8
    cache.fork(parent, child)
    assert child.num_computed_tokens == 4


def test_tensors_have_one_pair_per_layer() -> None:
    tensors = KVCacheTensors.empty(3, 5, 4, 2, 8, torch.bfloat16, "cpu")
    assert len(tensors.k) == len(tensors.v) == 3
    for tensor in tensors.k + tensors.v:
        assert tensor.shape == (5, 4, 2, 8)
        assert tensor.dtype == torch.bfloat16
    assert len({tensor.data_ptr() for tensor in tensors.k + tensors.v}) == 6


def test_available_memory_is_that_of_a_real_machine() -> None:
    assert 2**20 < available_memory("cpu") < 2**50


def test_default_size() -> None:
    def blocks(max_model_len: int, available_bytes: int) -> int:
        return default_num_blocks(32, 1000, max_model_len, max_num_seqs=4, available_bytes=available_bytes)

    assert blocks(100, 10**9) == 4 * num_blocks_for(100, 32)
    assert blocks(100_000, 10**9) == num_blocks_for(100_000, 32)  # one long sequence, more than four of 2,048
    assert blocks(100, 40_000) == 10  # a quarter of the memory
    assert blocks(4096, 10**9) == 4 * 2048 // 32
