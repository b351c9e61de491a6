import pytest
from support.blocks import block_manager, blocks_of

from fastinfer.engine.block_manager import BlockManager
from fastinfer.engine.block_pool import BlockPool
from fastinfer.engine.chunk import Chunk
from fastinfer.engine.scheduler import Scheduler
from fastinfer.engine.sequence import Sequence, SequenceState
from fastinfer.sampling_params import SamplingParams


def scheduler(
    num_blocks: int = 100,
    block_size: int = 4,
    max_num_seqs: int = 8,
    budget: int = 16,
    separates_roles: bool = False,
    chunk_multiple: int = 1,
) -> Scheduler:
    manager = block_manager(num_blocks, block_size)
    return Scheduler(manager, max_num_seqs, budget, separates_roles=separates_roles, chunk_multiple=chunk_multiple)


def sequence(name: str, num_tokens: int, priority: int = 0) -> Sequence:
    return Sequence(name, [1] * num_tokens, SamplingParams(), seed=0, priority=priority)


def run(chunks: list[Chunk]) -> dict[str, int]:
    """Do what the engine does after a step, and say how many tokens each sequence computed."""
    for chunk in chunks:
        is_last = chunk.is_last
        chunk.sequence.num_computed_tokens += chunk.num_tokens
        if is_last:
            chunk.sequence.token_ids.append(1)
    return {chunk.sequence.request_id: chunk.num_tokens for chunk in chunks}


def run_to_preemption(s: Scheduler, *sequences: Sequence) -> None:
    for each in sequences:
        s.add(each)
    while not s.num_preemptions:
        run(s.schedule())


def test_nothing_to_do() -> None:
    assert scheduler().schedule() == []


@pytest.mark.parametrize("budget", [1, 7, 64])
def test_a_prompt_is_cut_by_the_budget(budget: int) -> None:
    s = scheduler(budget=budget)
    s.add(sequence("a", 20))
    computed = 0
    while computed < 20:
        step = run(s.schedule())
        assert step == {"a": min(budget, 20 - computed)}
        computed += step["a"]
    assert run(s.schedule()) == {"a": 1}


@pytest.mark.parametrize("budget", [32, 37, 64])
@pytest.mark.parametrize("num_decodes", [0, 1, 7])
def test_chunks_of_prompts_end_at_multiples(budget: int, num_decodes: int) -> None:
    s = scheduler(budget=budget, max_num_seqs=12, chunk_multiple=4)
    for index in range(num_decodes):
        s.add(sequence(f"decode {index}", 1))
    run(s.schedule())
    prompts = [sequence(f"prompt {length}", length) for length in (53, 31, 2, 90)]
    for prompt in prompts:
        s.add(prompt)
    while any(prompt.num_computed_tokens < prompt.num_prompt_tokens for prompt in prompts):
        assert any(name.startswith("prompt") for name in run(s.schedule()))
        for prompt in prompts:
            computed = prompt.num_computed_tokens
            assert computed % 4 == 0 or computed >= prompt.num_prompt_tokens


def test_decodes_come_first_and_a_prompt_shares_the_step() -> None:
    s = scheduler(budget=8)
    s.add(sequence("a", 3))
    s.add(sequence("b", 3))
    assert run(s.schedule()) == {"a": 3, "b": 3}
    s.add(sequence("c", 10))
    assert run(s.schedule()) == {"a": 1, "b": 1, "c": 6}
    s.add(sequence("d", 1))
    assert run(s.schedule()) == {"a": 1, "b": 1, "c": 4, "d": 1}
    assert run(s.schedule()) == {"a": 1, "b": 1, "c": 1, "d": 1}


def test_first_come_first_served_within_max_num_seqs() -> None:
    s = scheduler(max_num_seqs=2)
    sequences = [sequence(name, 2) for name in "abc"]
    for each in sequences:
        s.add(each)
    assert list(run(s.schedule())) == ["a", "b"]
    assert list(run(s.schedule())) == ["a", "b"]
    s.finish(sequences[0])
    assert list(run(s.schedule())) == ["b", "c"]


@pytest.mark.parametrize(("priority", "expected"), [(0, ["a", "short"]), (1, ["a"])])
def test_only_an_equal_overtakes_one_that_waits_for_memory(priority: int, expected: list[str]) -> None:
    s = scheduler(num_blocks=4, budget=64)
    s.add(sequence("a", 8))
    s.add(sequence("long", 12))
    s.add(sequence("short", 1, priority))
    assert list(run(s.schedule())) == expected
    assert s.num_overtakings == len(expected) - 1


def test_nobody_overtakes_one_that_was_preempted() -> None:
    s = scheduler(num_blocks=6)
    a, b = sequence("a", 8), sequence("b", 8)
    run_to_preemption(s, a, b)
    assert s.waiting == [b]
    s.add(sequence("short", 1))
    while s.waiting:
        assert list(run(s.schedule())) == ["a"]
        if len(a) == 20:
            s.finish(a)
            assert list(run(s.schedule())) == ["b", "short"]


def test_one_that_was_preempted_takes_its_room_before_its_turn() -> None:
    """An older prompt takes all tokens that are given out in the order of service; the short one would get others."""
    s = scheduler(num_blocks=33, budget=8)
    s.add(sequence("old", 100))
    run(s.schedule())
    preempted, short = sequence("preempted", 20), sequence("short", 1)
    preempted.append(1)
    s.add(preempted)
    s.add(short)
    assert run(s.schedule()) == {"old": 4, "preempted": 4}
    assert s.waiting == [short]


@pytest.mark.parametrize("separates_roles", [False, True])
def test_a_step_computes_a_preempted_prompt_or_what_was_generated_after_it(separates_roles: bool) -> None:
    """Chunks with generated tokens come before prompts, whatever the order of service."""
    s = scheduler(separates_roles=separates_roles)
    preempted = sequence("preempted", 5)
    preempted.token_ids += [1] * 4
    s.add(preempted)
    first = run(s.schedule())
    s.add(sequence("urgent", 2, priority=-1))
    s.add(sequence("late", 3))
    second = list(run(s.schedule()).items())
    if separates_roles:
        assert first == {"preempted": 5}
        assert second == [("preempted", 4), ("urgent", 2), ("late", 3)]
    else:
        assert first == {"preempted": 9}
        assert second == [("preempted", 1), ("urgent", 2), ("late", 3)]
    assert list(run(s.schedule()).values()) == [1, 1, 1]


def test_nobody_takes_the_place_of_one_that_was_preempted() -> None:
    s = scheduler(num_blocks=8, max_num_seqs=2)
    a, b, short = sequence("a", 8), sequence("b", 12), sequence("short", 1)
    run_to_preemption(s, a, b, short)
    assert s.waiting == [b, short]
    assert (s.num_overtakings, s.block_manager.num_used) == (0, len(blocks_of(a)))


def test_nobody_is_admitted_in_the_step_of_a_preemption() -> None:
    s = scheduler(num_blocks=6)
    a, b, short = sequence("a", 4), sequence("b", 12), sequence("short", 1)
    s.add(a)
    s.add(b)
    run(s.schedule())
    for _ in range(4):
        assert run(s.schedule()) == {"a": 1, "b": 1}
    s.add(short)
    assert run(s.schedule()) == {"a": 1}
    assert (s.waiting, s.num_preemptions) == ([b, short], 1)


def test_the_newest_is_preempted_and_waits_at_the_front() -> None:
    s = scheduler(num_blocks=4)
    a, b, c = sequence("a", 4), sequence("b", 4), sequence("c", 4)
    for each in (a, b, c):
        s.add(each)
    # One block each; c is kept out, as a and b need their next blocks soon.
    assert run(s.schedule()) == {"a": 4, "b": 4}
    for _ in range(4):
        assert run(s.schedule()) == {"a": 1, "b": 1}
    assert (len(a), len(b)) == (9, 9)
    assert run(s.schedule()) == {"a": 1}
    assert s.num_preemptions == 1
    assert b.state is SequenceState.WAITING
    assert (blocks_of(b), b.num_computed_tokens, len(b)) == ([], 0, 9)
    assert list(s.waiting) == [b, c]
    s.finish(a)
    # Computed again with what it has generated. Then c waits for one block and one spare, and there is one.
    assert run(s.schedule()) == {"b": 9}


def test_the_newest_gives_way_itself_when_it_is_the_one_without_a_block() -> None:
    s = scheduler(num_blocks=4)
    a, b = sequence("a", 8), sequence("b", 3)
    s.add(a)
    s.add(b)
    assert run(s.schedule()) == {"a": 8, "b": 3}
    assert run(s.schedule()) == {"a": 1, "b": 1}  # a takes the last block
    assert run(s.schedule()) == {"a": 1}
    assert s.running == [a]
    assert list(s.waiting) == [b]
    assert (s.block_manager.num_used, len(blocks_of(a))) == (3, 3)


@pytest.mark.parametrize("steps", range(4))
def test_a_prompt_goes_on_in_the_room_of_one_that_gave_way(steps: int) -> None:
    """Also in the step whose only token is reserved for prompts, which have no room before the other gives way."""
    pools = [BlockPool(20), BlockPool(20, window=8)]
    s = Scheduler(BlockManager(pools, 1, enable_prefix_caching=False), max_num_seqs=4, max_num_batched_tokens=1)
    later, prompt = sequence("later", 3, priority=1), sequence("prompt", 9)
    s.add(later)
    while not later.is_decoding:
        run(s.schedule())
    s.add(prompt)
    while not prompt.num_computed_tokens:
        run(s.schedule())
    for _ in range(steps):
        run(s.schedule())
    for pool in pools:
        while pool.num_available:
            pool.take()
    assert run(s.schedule()) == {"prompt": 1}
    assert (s.running, s.waiting, s.num_preemptions) == ([prompt], [later], 1)


def test_a_prompt_leaves_a_block_to_each_other_sequence() -> None:
    pools = [BlockPool(100), BlockPool(9, window=8)]
    s = Scheduler(BlockManager(pools, 4, enable_prefix_caching=False), max_num_seqs=8, max_num_batched_tokens=64)
    for name in "ab":
        s.add(sequence(name, 4))
    run(s.schedule())
    s.add(sequence("prompt", 50))
    assert run(s.schedule()) == {"a": 1, "b": 1, "prompt": 12}  # of 20 that would have room
    for _ in range(4):
        assert run(s.schedule()) == {"a": 1, "b": 1}
    assert (s.num_preemptions, pools[1].num_available) == (0, 0)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_finish_frees_whatever_the_state_and_only_once(steps: int) -> None:
    s = scheduler(budget=4)
    a = sequence("a", 6)
    s.add(a)
    for _ in range(steps):
        run(s.schedule())
    s.finish(a)
    s.finish(a)
    assert a.state is SequenceState.FINISHED
    assert (s.block_manager.num_used, s.block_manager.num_free) == (0, 100)
    assert s.schedule() == []


def test_smaller_priorities_first_then_the_older() -> None:
    s = scheduler(max_num_seqs=1)
    sequences = [sequence(f"{priority} {index}", 2, priority) for index, priority in enumerate([1, 0, -5, 0, 1])]
    for each in sequences:
        s.add(each)
    order = []
    while s.waiting or s.running:
        [name] = run(s.schedule())
        order.append(name)
        s.finish(s.running[0])
    assert order == ["-5 2", "0 1", "0 3", "1 0", "1 4"]


def test_the_least_important_is_preempted_though_it_came_first() -> None:
    s = scheduler(num_blocks=4)
    late, urgent = sequence("late", 4, priority=5), sequence("urgent", 4)
    s.add(late)
    s.add(urgent)
    run(s.schedule())
    for _ in range(4):
        assert run(s.schedule()) == {"late": 1, "urgent": 1}
    assert run(s.schedule()) == {"urgent": 1}
    assert s.waiting == [late]


def test_an_urgent_prompt_does_not_hold_up_decodes() -> None:
    s = scheduler(budget=8)
    a, urgent = sequence("a", 3), sequence("urgent", 20, priority=-1)
    s.add(a)
    run(s.schedule())
    s.add(urgent)
    assert run(s.schedule()) == {"a": 1, "urgent": 7}
    assert run(s.schedule()) == {"a": 1, "urgent": 7}


def test_the_most_urgent_sequences_take_turns_among_themselves() -> None:
    s = scheduler(budget=64)
    for name, priority in (("a", 0), ("first", -1), ("b", 0), ("second", -1)):
        s.add(sequence(name, 3, priority))
    run(s.schedule())
    s.max_num_batched_tokens = 1
    assert [list(run(s.schedule())) for _ in range(4)] == [["first"], ["second"]] * 2
    s.max_num_batched_tokens = 3
    assert [list(run(s.schedule())) for _ in range(2)] == [["first", "second", "a"], ["first", "second", "b"]]


def test_who_runs_is_kept_in_order() -> None:
    s = scheduler()
    a, b, urgent, child = sequence("a", 3), sequence("b", 3), sequence("urgent", 3, priority=-1), sequence("a2", 3)
    child.order = a.order
    for each in (a, b):
        s.add(each)
    run(s.schedule())
    s.add(urgent)
    run(s.schedule())
    s.fork(a, child)
    assert s.running == [urgent, a, child, b], "the last one is the first to be preempted"


def test_a_fork_without_a_slot_waits_and_is_counted() -> None:
    s = scheduler(max_num_seqs=2)
    a = sequence("a", 3)
    children = [a.copy(), a.copy()]
    s.add(a)
    run(s.schedule())
    for child in children:
        s.fork(a, child)
    assert (s.running, s.waiting, s.num_queued_forks) == ([a, children[0]], [children[1]], 1)


def test_siblings_take_slots_before_they_run() -> None:
    s = scheduler(max_num_seqs=4)
    many, one, other = sequence("many", 3), sequence("one", 3), sequence("other", 3)
    many.siblings = [sequence("sibling", 3), sequence("sibling", 3)]
    for each in (many, one, other):
        s.add(each)
    assert run(s.schedule()) == {"many": 3, "one": 3}
    assert s.waiting == [other]


@pytest.mark.parametrize(("budget", "expected"), [(16, [4, 4, 4]), (9, [4, 2, 0]), (4, [1, 0, 0]), (1, [0])])
def test_drafts_share_the_budget(budget: int, expected: list[int]) -> None:
    s = scheduler(budget=64)
    for name in "abc":
        s.add(sequence(name, 3))
    run(s.schedule())
    s.max_num_batched_tokens = budget
    for each in s.running:
        each.num_drafts = 4
    assert [chunk.num_drafts for chunk in s.schedule()] == expected
    for each, count in zip(s.running, expected, strict=False):
        assert len(blocks_of(each)) == -(-(4 + count) // 4)


@pytest.mark.parametrize(
    ("budget", "expected"), [(1, (1, 0)), (3, (2, 0)), (5, (4, 0)), (6, (5, 0)), (7, (5, 1)), (20, (5, 4))]
)
def test_forced_tokens_come_before_drafts_but_after_one_token_of_each(budget: int, expected: tuple[int, int]) -> None:
    s = scheduler(budget=64)
    for name in "ab":
        s.add(sequence(name, 3))
    run(s.schedule())
    s.max_num_batched_tokens = budget
    first, _ = s.running
    first.token_ids += [1] * 4  # forced by a grammar, beside the drawn one
    first.num_drafts = 4
    chunks = s.schedule()
    assert (chunks[0].num_tokens, chunks[0].num_drafts) == expected
    assert [chunk.num_tokens for chunk in chunks[1:]] == ([1] if budget > 1 else [])


def test_nobody_is_preempted_for_a_guess() -> None:
    s = scheduler(num_blocks=3)
    a, b = sequence("a", 3), sequence("b", 3)
    s.add(a)
    s.add(b)
    run(s.schedule())
    for each in (a, b):
        each.num_drafts = 3
    assert [(chunk.sequence, chunk.num_drafts) for chunk in s.schedule()] == [(a, 3), (b, 0)]
    assert s.num_preemptions == 0


def test_when_all_wait_for_one_that_finds_no_room() -> None:
    """Two beams have their next tokens and hold all memory; the third needs some of it first."""
    s = scheduler(num_blocks=3)
    a, b, c = (sequence(name, 4) for name in "abc")
    for each in (a, b):
        s.add(each)
    for chunk in s.schedule():
        chunk.sequence.num_computed_tokens += chunk.num_tokens  # and no token is appended
    s.add(c)
    assert [chunk.sequence for chunk in s.schedule()] == [c]
    assert (b.state, blocks_of(b)) == (SequenceState.PENDING, [])
    assert s.running == [a, c]
    b.append(1)
    s.resume(b)
    assert s.waiting == [b]
