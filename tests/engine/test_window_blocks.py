"""Blocks outside a layer's attention window are given back, and prefixes are found without them."""

import random

import pytest
import torch
from support.toy import VOCAB_SIZE, ToyModel, check_blocks, drain, greedy, toy_engine

from fastinfer.engine.block_manager import BlockManager
from fastinfer.engine.block_pool import BlockPool
from fastinfer.engine.engine import Engine
from fastinfer.engine.sequence import Sequence
from fastinfer.sampling_params import SamplingParams

BLOCK_SIZE = 4


def manager_of(full: int, windowed: int, window: int = 8) -> BlockManager:
    return BlockManager([BlockPool(full), BlockPool(windowed, window)], BLOCK_SIZE)


def sequence(num_tokens: int) -> Sequence:
    return Sequence("r", list(range(num_tokens)), SamplingParams(), seed=0)


def compute(manager: BlockManager, tokens: Sequence, num_tokens: int) -> None:
    """Admit a sequence and compute its prompt in chunks, as steps do."""
    assert manager.can_allocate(tokens)
    manager.allocate(tokens)
    while tokens.num_computed_tokens < len(tokens):
        end = min(tokens.num_computed_tokens + num_tokens, len(tokens))
        assert manager.extend(tokens, end, spare=0) == end
        tokens.num_computed_tokens = end
        manager.end_step(tokens)


def held(tokens: Sequence) -> list[int]:
    return [len(table.held) for table in tokens.block_tables]


@pytest.mark.parametrize("window", range(1, 14))
@pytest.mark.parametrize("num_computed", range(40))
def test_exactly_the_blocks_that_no_later_token_sees_are_given_back(window: int, num_computed: int) -> None:
    seen = set(range(max(num_computed - window + 1, 0), num_computed + 1))
    expected = [block for block in range(11) if seen & set(range(block * BLOCK_SIZE, (block + 1) * BLOCK_SIZE))]
    assert BlockPool(1, window).num_dropped(num_computed, BLOCK_SIZE) == expected[0]
    assert BlockPool(1).num_dropped(num_computed, BLOCK_SIZE) == 0


def test_a_long_prompt_holds_its_window_and_a_chunk() -> None:
    manager = manager_of(25, 4)
    tokens = sequence(100)
    manager.allocate(tokens)
    for end in range(4, 101, 4):
        assert manager.extend(tokens, end, spare=0) == end
        assert held(tokens)[1] <= 3
        tokens.num_computed_tokens = end
        manager.end_step(tokens)
    assert held(tokens) == [25, 2]
    assert manager.num_used == 27
    manager.free(tokens)
    assert manager.num_used == 0


def test_a_chunk_takes_what_has_room() -> None:
    manager = manager_of(25, 4)
    tokens = sequence(100)
    manager.allocate(tokens)
    assert manager.extend(tokens, 100, spare=1) == 12
    assert manager.extend(tokens, 100, spare=0) == 16
    assert manager.extend(tokens, 100, spare=0) == 16


def test_a_sequence_that_decodes_gives_back_a_block_for_each_new_one() -> None:
    manager = manager_of(25, 3)
    tokens = sequence(8)
    compute(manager, tokens, 8)
    for _ in range(60):
        tokens.append(1)
        assert manager.append(tokens)
        tokens.num_computed_tokens += 1
        manager.end_step(tokens)
    assert held(tokens) == [17, 2]


@pytest.mark.parametrize(("num_taken", "hits"), [(0, 24), (1, 24), (20, 24), (22, 24), (23, 0)])
def test_a_prefix_needs_only_the_window_at_its_end(num_taken: int, hits: int) -> None:
    """Of 25 cached blocks the oldest ones are evicted, those of the prompt's beginning."""
    manager = manager_of(50, 25)
    first, second = sequence(100), sequence(98)  # the window of the last hit's next token: 2 blocks
    compute(manager, first, 100)
    manager.free(first)
    for _ in range(num_taken):
        manager.pools[1].take()
    manager.allocate(second)
    assert second.num_computed_tokens == hits * BLOCK_SIZE
    windowed = second.block_tables[1]
    assert windowed.num_dropped == max(hits - 2, 0)
    assert len(windowed.blocks) == hits
    assert held(second) == [25, min(hits, 2)]


def test_a_gap_in_the_window_ends_the_prefix_before_it() -> None:
    manager = manager_of(50, 25)
    first, second = sequence(100), sequence(100)
    compute(manager, first, 100)
    manager.free(first)
    pool = manager.pools[1]
    index = 20
    lost = pool.find(manager._content(first, index))
    assert lost is not None
    pool._contents[lost] = None
    del pool._by_key[first.block_keys[index]], pool._cached[lost]
    pool._free.append(lost)
    manager.allocate(second)
    assert second.num_computed_tokens == 24 * BLOCK_SIZE  # blocks 22 and 23 are enough for what follows
    manager.free(second)
    shorter = sequence(21 * BLOCK_SIZE + 2)  # blocks 19 and 20 would be seen
    manager.allocate(shorter)
    assert shorter.num_computed_tokens == 20 * BLOCK_SIZE


def test_forks_share_the_window_and_copy_in_each_group() -> None:
    manager = manager_of(20, 20)
    parent, child = sequence(30), sequence(30)
    compute(manager, parent, 30)
    manager.fork(parent, child)
    assert held(child) == held(parent) == [8, 3]
    assert manager.num_used == 11
    for each in (parent, child):
        each.append(1)
        assert manager.append(each)
    assert [len(pairs) for pairs in manager.pending_copies] == [1, 1]
    for each in (parent, child):
        each.num_computed_tokens += 1
        manager.end_step(each)
        manager.free(each)
    assert manager.num_used == 0


def windowed_engine(windows: tuple[int, int], **options: object) -> Engine:
    limits = {"block_size": BLOCK_SIZE, "max_num_batched_tokens": 8, "max_num_seqs": 4, **options}
    return toy_engine(model=ToyModel(windows), **limits)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1, VOCAB_SIZE), k=length)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_memory_is_bounded_and_the_text_is_that_of_full_attention(asynchronous: bool) -> None:
    engine = windowed_engine((0, 6), async_scheduling=asynchronous, enable_prefix_caching=False)
    prompt = prompt_of(50)
    engine.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True), request_id="a")
    most, tokens = 0, []
    while engine.has_unfinished:
        for output in engine.step():
            tokens = output.outputs[0].token_ids
        check_blocks(engine)
        windowed = engine.block_manager.pools[1]
        most = max(most, windowed.num_blocks - windowed.num_available)
    assert tokens == greedy(prompt, 40, stop_at_eos=False)
    assert most <= 6 // BLOCK_SIZE + 2 + 8 // BLOCK_SIZE


def test_without_full_attention_a_text_may_be_longer_than_the_cache() -> None:
    """Blocks of all three sequences are reused many times; each text is what it is alone in a large cache."""
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    engines = [windowed_engine((6, 6), num_kv_blocks=count) for count in (9, 200)]
    assert all(engine.max_model_len == 96 for engine in engines)
    texts = []
    for engine in engines:
        if engine is engines[0]:
            for index in range(3):
                engine.add_request(prompt_of(40 + index, index), params, request_id=str(index))
            texts.append(drain(engine))
            check_blocks(engine)
        else:
            alone = {}
            for index in range(3):
                engine.add_request(prompt_of(40 + index, index), params, request_id=str(index))
                alone |= drain(engine)
            texts.append(alone)
    for key, output in texts[0].items():
        assert output.outputs[0].token_ids == texts[1][key].outputs[0].token_ids


def test_prompts_that_block_each_other_all_finish() -> None:
    engine = windowed_engine((9, 9), num_kv_blocks=6, max_num_batched_tokens=64, max_num_seqs=4)
    params = SamplingParams(temperature=0.0, max_tokens=5)
    for index in range(6):
        engine.add_request(prompt_of(60, index), params, request_id=str(index))
    assert len(drain(engine, limit=500)) == 6
    check_blocks(engine)


def test_a_second_request_finds_the_prefix_of_a_text_that_is_longer_than_the_window() -> None:
    engine = windowed_engine((0, 6))
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    first = prompt_of(40)
    engine.add_request(first, params, request_id="a")
    whole = first + drain(engine)["a"].outputs[0].token_ids
    assert engine.stats().num_hit_tokens == 0
    engine.add_request([*whole, 5, 6, 7], params, request_id="b")
    output = drain(engine)["b"]
    assert engine.stats().num_hit_tokens == 40
    assert output.outputs[0].token_ids == greedy([*whole, 5, 6, 7], 4, stop_at_eos=False)


@pytest.mark.parametrize("length", [32, 36, 37, 38, 39])
def test_a_pinned_prompt_keeps_its_window(length: int) -> None:
    """Also if its last block is not full: those who begin with it have all blocks before that one."""
    engine = windowed_engine((0, 7), num_kv_blocks=100)
    module = prompt_of(length)
    engine.pin_prompt("m", module)
    drain(engine)
    pool = engine.block_manager.pools[1]
    # The token after the full blocks, at 32 or 36, sees the last two of them.
    assert pool.num_blocks - pool.num_available == 2 + (length % BLOCK_SIZE > 0)
    for index in range(20):  # everything else in the cache is replaced
        engine.add_request(prompt_of(50, index + 1), SamplingParams(max_tokens=2), request_id=str(index))
    drain(engine)
    before = engine.stats().num_hit_tokens
    engine.add_request([*module, 3, 4], SamplingParams(temperature=0.0, max_tokens=4), request_id="a")
    assert drain(engine)["a"].outputs[0].token_ids == greedy([*module, 3, 4], 4)
    assert engine.stats().num_hit_tokens - before == length // BLOCK_SIZE * BLOCK_SIZE
    check_blocks(engine)


def test_the_groups_are_the_windows_of_the_layers() -> None:
    engine = windowed_engine((0, 6))
    assert [pool.window for pool in engine.block_manager.pools] == [0, 6]
    assert [layer.group for layer in engine.worker.kv_cache] == [0, 1]
    full, windowed = (layer.k for layer in engine.worker.kv_cache)
    assert len(full) == engine.block_manager.pools[0].num_blocks > len(windowed)
    assert windowed.dtype == torch.float32
    wide = windowed_engine((0, 90), max_model_len=80)
    assert [pool.window for pool in wide.block_manager.pools] == [0], "no sequence is longer than the window"
    drafted = toy_engine(ToyModel(), ToyModel((0, 6)), num_speculative_tokens=2)
    assert [pool.window for pool in drafted.block_manager.pools] == [0], "a draft model uses the same block numbers"
