import pytest
from support.blocks import block_manager, blocks_of

from fastinfer.engine.block_manager import BlockManager
from fastinfer.engine.sequence import Sequence
from fastinfer.sampling_params import SamplingParams


def sequence(num_tokens: int) -> Sequence:
    return Sequence("r", list(range(num_tokens)), SamplingParams(), seed=0)


@pytest.mark.parametrize(("num_tokens", "blocks"), [(1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_allocate_takes_whole_blocks_and_free_gives_them_back(num_tokens: int, blocks: int) -> None:
    manager = block_manager(3, 4)
    tokens = sequence(num_tokens)
    assert manager.can_allocate(tokens)
    manager.allocate(tokens)
    assert len(blocks_of(tokens)) == manager.num_used == blocks
    assert manager.num_free == 3 - blocks
    manager.free(tokens)
    manager.free(tokens)
    assert (manager.num_free, manager.num_used, blocks_of(tokens)) == (3, 0, [])


def test_can_allocate_counts_the_spare_blocks() -> None:
    manager = block_manager(3, 4)
    assert not manager.can_allocate(sequence(13))
    assert manager.can_allocate(sequence(8), spare=1)
    assert not manager.can_allocate(sequence(9), spare=1)


def test_append_takes_a_block_only_at_a_border() -> None:
    manager = block_manager(2, 4)
    tokens = sequence(3)
    manager.allocate(tokens)
    for used in (1, 2, 2, 2, 2):
        tokens.token_ids.append(0)
        assert manager.append(tokens)
        assert manager.num_used == used
    tokens.token_ids.append(0)
    assert not manager.append(tokens)


def test_two_sequences_never_share_a_block() -> None:
    manager = block_manager(5, 2)
    first, second = sequence(4), sequence(5)
    manager.allocate(first)
    manager.allocate(second)
    assert sorted(blocks_of(first) + blocks_of(second)) == [0, 1, 2, 3, 4]


def test_freed_blocks_are_used_before_untouched_memory() -> None:
    manager = block_manager(100, 1)
    for _ in range(20):
        tokens = sequence(3)
        manager.allocate(tokens)
        assert blocks_of(tokens) == [0, 1, 2]
        manager.free(tokens)


def compute(manager: BlockManager, tokens: Sequence) -> None:
    """Mark all tokens as computed, as a step does."""
    tokens.num_computed_tokens = len(tokens)
    manager.end_step(tokens)


def check(manager: BlockManager, free: int, cached: int, used: int) -> None:
    assert (manager.num_free, manager.num_cached, manager.num_used) == (free, cached, used)
    assert free + cached + used == manager.num_blocks


def test_fork_shares_all_blocks_until_both_are_gone() -> None:
    manager = block_manager(5, 4)
    parent, child = sequence(10), sequence(10)
    manager.allocate(parent)
    compute(manager, parent)
    manager.fork(parent, child)
    assert blocks_of(child) == blocks_of(parent) == [0, 1, 2]
    assert blocks_of(child) is not blocks_of(parent)
    assert child.num_computed_tokens == 10
    check(manager, 2, 0, 3)
    manager.free(parent)
    check(manager, 2, 0, 3)
    manager.free(child)
    check(manager, 3, 2, 0)


def test_the_first_to_write_into_a_shared_block_gets_a_copy() -> None:
    manager = block_manager(5, 4)
    parent, child = sequence(10), sequence(10)
    manager.allocate(parent)
    compute(manager, parent)
    manager.fork(parent, child)
    known = blocks_of(parent)
    for each in (parent, child):
        each.token_ids.append(7)
        assert manager.append(each)
    assert blocks_of(parent) == [0, 1, 3]
    assert blocks_of(parent) is not known, "whoever has copied the list must see that it changed"
    assert blocks_of(child) == [0, 1, 2]
    assert manager.pending_copies == [[(2, 3)]]
    check(manager, 1, 0, 4)
    manager.free(parent)
    manager.free(child)
    check(manager, 3, 2, 0)


def test_forks_that_go_on_differently_are_both_found() -> None:
    manager = block_manager(20, 4)
    parent, child = sequence(10), sequence(10)
    manager.allocate(parent)
    compute(manager, parent)
    manager.fork(parent, child)
    for token, each in enumerate((parent, child), 50):
        each.token_ids += [token] * 3
        assert manager.append(each)
        compute(manager, each)
    for each in (parent, child):
        manager.free(each)
        again = Sequence("r", list(each.token_ids), SamplingParams(), seed=0)
        manager.allocate(again)
        assert again.num_computed_tokens == 12
        manager.free(again)


def test_all_of_a_preempted_text_is_prefill() -> None:
    manager = block_manager(20, 4, enable_prefix_caching=False)
    tokens = sequence(6)
    manager.allocate(tokens)
    compute(manager, tokens)
    tokens.token_ids += [1, 2, 3]
    assert tokens.is_decoding
    manager.free(tokens)
    manager.allocate(tokens)
    tokens.num_computed_tokens = 8
    assert not tokens.is_decoding
    tokens.num_computed_tokens = 9
    assert tokens.is_decoding


def test_a_copy_needs_a_free_block() -> None:
    manager = block_manager(3, 4)
    parent, child = sequence(10), sequence(10)
    manager.allocate(parent)
    compute(manager, parent)
    manager.fork(parent, child)
    parent.token_ids.append(7)
    assert not manager.append(parent)
    manager.free(child)
    assert manager.append(parent)
    assert (blocks_of(parent), manager.pending_copies) == ([0, 1, 2], [[]])


def test_blocks_reserved_for_drafts_do_not_pay_for_a_copy() -> None:
    manager = block_manager(4, 4)
    parent, child = sequence(7), sequence(7)
    manager.allocate(parent)
    compute(manager, parent)
    assert manager.append(parent, num_drafts=9)
    manager.fork(parent, child)
    parent.token_ids.append(7)
    assert len(blocks_of(parent)) == 4
    assert not manager.append(parent), "the copy needs a free block, however many the parent has"
    assert manager.pending_copies == [[]]


def test_a_fork_at_a_border_copies_nothing() -> None:
    manager = block_manager(4, 4)
    parent, child = sequence(8), sequence(8)
    manager.allocate(parent)
    compute(manager, parent)
    manager.fork(parent, child)
    for each in (parent, child):
        each.token_ids.append(7)
        assert manager.append(each)
    assert (blocks_of(parent), blocks_of(child), manager.pending_copies) == ([0, 1, 2], [0, 1, 3], [[]])


def test_blocks_reserved_for_drafts_are_not_forked() -> None:
    manager = block_manager(9, 4)
    parent, child = sequence(7), sequence(7)
    manager.allocate(parent)
    compute(manager, parent)
    parent.token_ids.append(7)
    assert manager.append(parent, num_drafts=6)
    assert len(blocks_of(parent)) == 4
    manager.fork(parent, child)
    assert blocks_of(child) == blocks_of(parent)[:2]


@pytest.mark.parametrize(("num_tokens", "hits"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (13, 3), (30, 3)])
def test_prefixes_are_found_in_full_blocks_and_a_token_is_left(num_tokens: int, hits: int) -> None:
    manager = block_manager(20, 4)
    first = sequence(14)
    manager.allocate(first)
    compute(manager, first)
    blocks = list(blocks_of(first))
    manager.free(first)
    check(manager, 17, 3, 0)
    second = sequence(num_tokens)
    manager.allocate(second)
    assert blocks_of(second)[:hits] == blocks[:hits]
    assert second.num_computed_tokens == 4 * hits
    assert (manager.num_hit_tokens, manager.num_queried_tokens) == (4 * hits, 14 + num_tokens)
    assert manager.num_used == -(-num_tokens // 4)
    assert not set(blocks_of(second)[hits:]) & set(blocks[:hits])


def test_what_is_not_computed_is_not_found() -> None:
    manager = block_manager(20, 4)
    first, second = sequence(12), sequence(12)
    manager.allocate(first)
    first.num_computed_tokens = 7
    manager.end_step(first)
    manager.allocate(second)
    assert second.num_computed_tokens == 4


def test_a_token_that_differs_ends_the_prefix() -> None:
    manager = block_manager(20, 4)
    first, second = sequence(13), sequence(13)
    second.token_ids[5] = 99
    manager.allocate(first)
    compute(manager, first)
    manager.allocate(second)
    assert second.num_computed_tokens == 4


@pytest.mark.parametrize("kind", ["salt", "adapter", "off for the sequence", "off"])
def test_who_may_not_share(kind: str) -> None:
    manager = block_manager(20, 4, enable_prefix_caching=kind != "off")
    other = {"salt": {"cache_salt": "b"}, "off for the sequence": {"reads_prefix": False}}
    first = sequence(13)
    second = Sequence("r", list(range(13)), SamplingParams(), seed=0, **other.get(kind, {}))  # type: ignore[arg-type]
    if kind == "adapter":
        second.use_adapter(0, "digest")
    for each in (first, second):
        manager.allocate(each)
        assert each.num_computed_tokens == 0
        compute(manager, each)
        manager.free(each)
    assert manager.num_cached == {"off": 0, "off for the sequence": 3}.get(kind, 6)


def test_tokens_are_compared_and_a_hash_alone_proves_nothing() -> None:
    manager = block_manager(20, 4)
    first, second = sequence(9), sequence(9)
    manager.allocate(first)
    compute(manager, first)
    second.token_ids[0] = 99
    second.block_keys = list(first.block_keys)  # as if both texts had the same hash
    manager.allocate(second)
    assert second.num_computed_tokens == 0


def test_the_least_recently_used_block_goes_first_and_ends_before_beginnings() -> None:
    manager = block_manager(6, 1)
    old, new = sequence(3), Sequence("r", [50, 51, 52], SamplingParams(), seed=0)
    for each in (old, new):
        manager.allocate(each)
        compute(manager, each)
    manager.free(old)
    manager.free(new)
    check(manager, 0, 6, 0)

    def prefix(tokens: list[int]) -> int:
        return manager._find_prefix(Sequence("r", [*tokens, 0], SamplingParams(), seed=0))[0]

    lengths = []
    for _ in range(6):
        manager.pools[0].take()
        lengths.append((prefix([0, 1, 2]), prefix([50, 51, 52])))
    assert lengths == [(2, 3), (1, 3), (0, 3), (0, 2), (0, 1), (0, 0)]


def test_a_hit_makes_a_block_new_again() -> None:
    manager = block_manager(4, 1)
    first, second = Sequence("r", [1], SamplingParams(), seed=0), Sequence("r", [2], SamplingParams(), seed=0)
    for each in (first, second):
        manager.allocate(each)
        compute(manager, each)
        manager.free(each)
    again = Sequence("r", [1, 3], SamplingParams(), seed=0)
    manager.allocate(again)
    assert again.num_computed_tokens == 1
    manager.free(again)
    oldest = manager.pools[0]._by_key[second.block_keys[0]]
    assert list(manager.pools[0]._cached) == [oldest, manager.pools[0]._by_key[first.block_keys[0]]]
    for _ in range(2):
        manager.pools[0].take()
    assert manager.pools[0].take() == oldest


def test_hits_that_nobody_holds_are_not_counted_as_room() -> None:
    manager = block_manager(3, 4)
    first = sequence(9)
    manager.allocate(first)
    compute(manager, first)
    manager.free(first)
    check(manager, 1, 2, 0)
    assert manager.can_allocate(sequence(12))
    assert not manager.can_allocate(sequence(12), spare=1)
    assert not manager.can_allocate(sequence(13))


def test_a_prefix_that_was_evicted_and_computed_again_is_shared_by_one_that_waits() -> None:
    def other(token: int, num_tokens: int) -> Sequence:
        result = Sequence("r", [token] * num_tokens, SamplingParams(), seed=0)
        manager.allocate(result)
        return result

    manager = block_manager(12, 4)
    prefix = sequence(24)
    manager.allocate(prefix)
    compute(manager, prefix)
    manager.free(prefix)
    _, short = other(100, 20), other(101, 4)
    waiting = sequence(28)
    assert not manager.can_allocate(waiting)
    manager.free(other(102, 24))  # in place of all cached blocks
    again = sequence(24)
    manager.allocate(again)
    compute(manager, again)
    manager.free(short)
    assert manager.can_allocate(waiting)


def test_two_that_compute_the_same_at_the_same_time() -> None:
    manager = block_manager(8, 4)
    first, second = sequence(8), sequence(8)
    for each in (first, second):
        manager.allocate(each)
    for each in (first, second):
        compute(manager, each)
    manager.free(first)
    manager.free(second)
    check(manager, 6, 2, 0)


def test_reset_forgets_the_contents_and_keeps_the_sequences() -> None:
    manager = block_manager(8, 4)
    first, second = sequence(8), Sequence("r", [9] * 8, SamplingParams(), seed=0)
    for each in (first, second):
        manager.allocate(each)
        compute(manager, each)
    manager.free(first)
    check(manager, 4, 2, 2)
    manager.reset_prefix_cache()
    check(manager, 6, 0, 2)
    manager.free(second)
    check(manager, 8, 0, 0)
