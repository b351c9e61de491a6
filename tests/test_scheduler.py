import pytest

from fastinfer.engine.kv_cache import KVCache
from fastinfer.engine.scheduler import Chunk, Scheduler
from fastinfer.engine.sequence import Sequence, SequenceState
from fastinfer.sampling_params import SamplingParams


def scheduler(num_blocks: int = 100, block_size: int = 4, max_num_seqs: int = 8, budget: int = 16) -> Scheduler:
    return Scheduler(KVCache(num_blocks, block_size), max_num_seqs, budget)


def sequence(name: str, num_tokens: int) -> Sequence:
    return Sequence(name, [1] * num_tokens, SamplingParams(), seed=0)


def run(chunks: list[Chunk]) -> dict[str, int]:
    """Do what the engine does after a step, and say how many tokens each sequence computed."""
    for chunk in chunks:
        is_last = chunk.is_last
        chunk.sequence.num_computed_tokens += chunk.num_tokens
        if is_last:
            chunk.sequence.token_ids.append(1)
    return {chunk.sequence.request_id: chunk.num_tokens for chunk in chunks}


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


def test_decodes_come_first_and_a_prompt_shares_the_step() -> None:
    s = scheduler(budget=8)
    s.add(sequence("a", 3))
    s.add(sequence("b", 3))
    assert run(s.schedule()) == {"a": 3, "b": 3}
    s.add(sequence("c", 10))
    s.add(sequence("d", 1))
    assert run(s.schedule()) == {"a": 1, "b": 1, "c": 6}
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


def test_a_short_request_does_not_overtake_one_that_waits_for_memory() -> None:
    s = scheduler(num_blocks=4)
    s.add(sequence("a", 8))
    s.add(sequence("long", 12))
    s.add(sequence("short", 1))
    assert list(run(s.schedule())) == ["a"]


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
    assert (b.blocks, b.num_computed_tokens, len(b)) == ([], 0, 9)
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
    assert (s.kv_cache.num_used, len(a.blocks)) == (3, 3)


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
    assert (s.kv_cache.num_used, s.kv_cache.num_free) == (0, 100)
    assert s.schedule() == []
