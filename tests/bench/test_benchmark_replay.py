"""How benchmarks run requests and read the clock."""

import pytest
from support.fake_clock import FakeClock, use_fake_clock
from support.toy import MAX_POSITION, VOCAB_SIZE, greedy
from support.toy_subject import toy_subject

from fastinfer.benchmarks.no_kv_cache import replay_without_kv_cache
from fastinfer.benchmarks.replay import Job, Replay, Timeline, replay
from fastinfer.errors import RequestError
from fastinfer.outputs import CompletionOutput, RequestMetrics, RequestOutput
from fastinfer.sampling_params import SamplingParams


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    return use_fake_clock(monkeypatch)


def job(length: int, max_tokens: int, arrival_s: float = 0.0, ignore_eos: bool = True) -> Job:
    prompt = [(7 * length + 3 * i) % VOCAB_SIZE for i in range(length)]
    return Job(prompt, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=ignore_eos), arrival_s)


def expected(job: Job) -> list[int]:
    assert job.params.max_tokens is not None
    return greedy(job.prompt_token_ids, job.params.max_tokens, stop_at_eos=False)


def timeline(arrival_s: float, moments: list[float], counts: list[int]) -> Timeline:
    return Timeline(job(1, counts[-1], arrival_s), moments, counts, list(range(counts[-1])), "length")


def test_replay_does_the_work_in_any_order_of_arrival() -> None:
    jobs = [job(5, 8, 0.04), job(20, 3), job(9, 12, 0.02)]
    run = replay(toy_subject().make_engine(max_num_seqs=2), jobs)
    assert [t.token_ids for t in run.timelines] == [expected(j) for j in jobs]
    assert run.num_tokens == run.num_outputs == 23
    for t in run.timelines:
        assert t.counts == list(range(1, len(t.token_ids) + 1))
        assert t.moments == sorted(t.moments)
        assert t.first_token_s > 0
        assert len(t.gaps_s) == len(t.token_ids) - 1
    assert run.seconds == max(t.moments[-1] for t in run.timelines)


def test_replay_sleeps_until_the_first_arrival_and_counts_from_then(clock: FakeClock) -> None:
    """A prompt of three tokens takes three seconds, the next token one."""
    run = replay(toy_subject().make_engine(), [job(3, 3, 10.0)])
    assert run.timelines[0].moments == [13.0, 14.0, 15.0]
    assert run.timelines[0].first_token_s == 3.0
    assert run.seconds == clock.now - 10.0 == 5.0


def test_first_token_counts_what_a_request_waits(clock: FakeClock) -> None:
    first, second = replay(toy_subject().make_engine(max_num_seqs=1), [job(4, 10), job(5, 1)]).timelines
    assert (first.first_token_s, first.decode_s) == (4.0, 9.0)
    assert second.first_token_s == 4.0 + 9.0 + 5.0


def test_replay_refuses_missing_tokens() -> None:
    with pytest.raises(RequestError, match=r"expected 90 new tokens after 20 prompt tokens, got 76 \(the context"):
        replay(toy_subject().make_engine(), [job(20, 90)])
    with pytest.raises(RequestError, match="max_model_len"):
        replay(toy_subject().make_engine(), [job(MAX_POSITION, 1)])


def test_replay_refuses_what_failed() -> None:
    completion = CompletionOutput(0, "", [1, 2], "error", "ValueError: broken", None, "")
    output = RequestOutput("0", None, [1], [completion], True, RequestMetrics(0, 0, 0, 0))
    with pytest.raises(RequestError, match="broken"):
        Timeline(job(1, 2)).add(1.0, output)


def test_a_text_may_end_by_itself_where_that_was_asked_for() -> None:
    prompt = next(p for p in ([i, j] for i in range(VOCAB_SIZE) for j in range(9)) if len(greedy(p, 60)) < 60)
    params = SamplingParams(temperature=0, max_tokens=60)
    assert replay(toy_subject().make_engine(), [Job(prompt, params)]).timelines[0].token_ids == greedy(prompt, 60)


def test_decode_window() -> None:
    first = timeline(0, [1.0, 2.0, 3.0, 4.0], [1, 2, 3, 4])
    second = timeline(0, [2.0, 3.0, 4.0, 5.0], [1, 4, 5, 6])  # three tokens in its second step
    window = Replay(5.0, [first, second]).decode_window()
    assert window is not None
    assert (window.seconds, window.num_tokens, window.num_outputs) == (2.0, 2 + 4, 2 + 2)
    assert Replay(5.0, [first, second]).tokens_per_s == 2.0


def test_decode_window_of_one() -> None:
    window = Replay(9.0, [timeline(0, [1.0, 1.5, 3.0], [1, 2, 3])]).decode_window()
    assert window is not None
    assert (window.seconds, window.num_tokens) == (2.0, 2)


def test_no_decode_window_where_the_first_ends_before_the_last_begins() -> None:
    assert Replay(9.0, [timeline(0, [1.0, 2.0], [1, 2]), timeline(0, [2.0, 3.0], [1, 2])]).decode_window() is None


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_without_kv_cache_every_token_recomputes_the_text(batch_size: int) -> None:
    engine = toy_subject().make_engine(max_num_seqs=batch_size, enable_prefix_caching=False)
    jobs = [job(4, 3), job(6, 5), job(3, 1)]
    run = replay_without_kv_cache(engine, jobs, batch_size, limit_s=60)
    assert [t.token_ids for t in run.timelines] == [expected(j) for j in jobs]
    # 4 + 5 + 6, 6 + 7 + 8 + 9 + 10, and 3 tokens went through the model.
    assert sum(engine.model.batch_sizes) == 15 + 40 + 3
    assert run.seconds == max(t.moments[-1] for t in run.timelines)


def test_without_kv_cache_stops_at_the_limit() -> None:
    engine = toy_subject().make_engine(enable_prefix_caching=False)
    run = replay_without_kv_cache(engine, [job(4, 3), job(6, 5)], 1, limit_s=1e-9)
    assert [t.counts for t in run.timelines] == [[1], []]
    assert run.num_tokens == 1


def test_without_kv_cache_refuses_a_prefix_cache() -> None:
    with pytest.raises(RequestError, match="enable_prefix_caching"):
        replay_without_kv_cache(toy_subject().make_engine(), [job(4, 3)], 1, limit_s=60)
