"""Static and dynamic batching: when requests are passed on to the engine."""

import pytest
from support.fake_clock import FakeClock, use_fake_clock
from support.toy import VOCAB_SIZE
from support.toy_subject import toy_subject

from fastinfer.benchmarks.batching import Continuous, Dynamic, Static, policies
from fastinfer.benchmarks.replay import Job, replay
from fastinfer.sampling_params import SamplingParams


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    return use_fake_clock(monkeypatch)


def job(length: int, max_tokens: int, arrival_s: float = 0.0) -> Job:
    prompt = [(7 * length + 3 * i) % VOCAB_SIZE for i in range(length)]
    return Job(prompt, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True), arrival_s)


def test_continuous_batching_holds_nobody_back() -> None:
    assert Continuous().num_ready([4, 5, 900], 0.0, is_idle=False) == 3


def test_a_static_batch_runs_to_its_end() -> None:
    assert Static(2).num_ready([4, 5, 6], 0.0, is_idle=True) == 2
    assert Static(2).num_ready([4], 0.0, is_idle=True) == 1
    assert Static(2).num_ready([4], 99.0, is_idle=False) == 0


@pytest.mark.parametrize(
    ("policy", "lengths", "waited_s", "count"),
    [
        (Dynamic(3, 10, 5.0), [4], 4.9, 0),
        (Dynamic(3, 10, 5.0), [4, 4], 4.9, 0),
        (Dynamic(3, 10, 5.0), [4, 4, 2], 0.0, 3),  # as many as fit
        (Dynamic(9, 9, 5.0), [4, 4, 2], 0.0, 2),  # the tokens of two
        (Dynamic(9, 10, 5.0), [4, 4, 2], 0.0, 0),  # there is room for more
        (Dynamic(3, 10, 5.0), [11, 4], 0.0, 1),  # a long prompt is a batch of its own
        (Dynamic(3, 10, 5.0), [4, 4], 5.0, 2),
        (Dynamic(1, 10, 5.0), [4, 4], 0.0, 1),
    ],
)
def test_a_dynamic_batch_waits_for_company_but_not_for_ever(
    policy: Dynamic, lengths: list[int], waited_s: float, count: int
) -> None:
    assert policy.num_ready(lengths, waited_s, is_idle=True) == count
    assert policy.num_ready(lengths, 99.0, is_idle=False) == 0


def test_the_next_static_batch_starts_when_this_one_has_ended(clock: FakeClock) -> None:
    """A step takes a second per token. The third request has arrived after three seconds, and waits for the second."""
    jobs = [job(2, 2), job(3, 5), job(4, 1, 3.0)]
    run = replay(toy_subject().make_engine(max_num_seqs=2), jobs, Static(2))
    first, second, third = run.timelines
    assert first.moments == [5.0, 7.0]
    assert second.moments == [5.0, 7.0, 8.0, 9.0, 10.0]
    assert third.moments == [14.0]
    assert third.first_token_s == 11.0


def test_a_dynamic_batch_is_asked_for_until_it_has_waited_long_enough(clock: FakeClock) -> None:
    jobs = [job(2, 1), job(3, 1, 0.02)]
    run = replay(toy_subject().make_engine(), jobs, Dynamic(4, 100, max_wait_s=0.1))
    assert [timeline.moments for timeline in run.timelines] == [[pytest.approx(5.1, abs=2e-3)]] * 2


def test_all_policies() -> None:
    assert {name: type(policy) for name, policy in policies(3, 100).items()} == {
        "continuous": Continuous,
        "static": Static,
        "dynamic": Dynamic,
    }
