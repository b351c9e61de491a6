"""Limits on a request's time, on a clock that the tests set."""

import gc
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from support.toy import check_blocks, drain, greedy, toy_engine
from support.toy_grammar import Letters, constrained

from fastinfer import BeamSearchParams, RequestError, SamplingParams, StructuredOutputsParams
from fastinfer.engine import deadlines
from fastinfer.engine.engine import Engine

LONG = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(deadlines, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


def end_of(engine: Engine, request_id: str, outputs: dict[str, Any]) -> tuple[Any, Any]:
    check_blocks(engine)
    last = outputs[request_id]
    assert last.finished
    completion = last.outputs[0] if hasattr(last, "outputs") else last
    return completion.finish_reason, completion.stop_reason


def test_a_running_request_ends_with_what_it_has(clock: SimpleNamespace) -> None:
    engine = toy_engine()
    request, other = engine.add_request([1, 2], LONG, timeout=5), engine.add_request([1, 2], LONG, timeout=6)
    for _ in range(7):
        engine.step()
    clock.now += 4.999
    assert not any(output.finished for output in engine.step())
    clock.now += 0.001
    outputs = {output.request_id: output for output in engine.step()}
    assert end_of(engine, request, outputs) == ("timeout", "timeout")
    assert outputs[request].outputs[0].token_ids == greedy([1, 2], 8, stop_at_eos=False)
    assert drain(engine)[other].outputs[0].token_ids == greedy([1, 2], 50, stop_at_eos=False)
    assert engine.stats().num_expired == 1


def test_a_queue_timeout_ends_only_what_has_not_begun(clock: SimpleNamespace) -> None:
    engine = toy_engine(max_num_seqs=1)
    running = engine.add_request([1], LONG, queue_timeout=5)
    engine.step()
    waiting = engine.add_request([2], LONG, queue_timeout=5)
    patient = engine.add_request([3], LONG, queue_timeout=500)
    clock.now += 5
    outputs = drain(engine)
    assert end_of(engine, waiting, outputs) == ("timeout", "queue_timeout")
    assert outputs[waiting].outputs[0].token_ids == []
    for request, prompt in ((running, [1]), (patient, [3])):
        assert outputs[request].outputs[0].token_ids == greedy(prompt, 50, stop_at_eos=False)


def test_a_preempted_request_has_begun(clock: SimpleNamespace) -> None:
    engine = toy_engine(block_size=4, num_kv_blocks=24, max_num_seqs=2)
    requests = [engine.add_request([number] * 20, LONG, queue_timeout=5) for number in (1, 2)]
    while not engine.stats().num_preemptions:
        engine.step()
    clock.now += 5
    outputs = drain(engine)
    assert [outputs[request].outputs[0].finish_reason for request in requests] == ["length"] * 2


@pytest.mark.parametrize("kind", ["beams", "embedding", "grammar", "completions"])
def test_every_kind_of_request(kind: str, clock: SimpleNamespace) -> None:
    three = SamplingParams(n=3, max_tokens=9, ignore_eos=True)  # a drawn end-of-sequence would come before the deadline
    add = {
        "beams": lambda engine: engine.add_beam_request([1], BeamSearchParams(beam_width=3, max_tokens=9), timeout=1),
        "embedding": lambda engine: engine.add_embedding_request([1] * 40, timeout=1),
        "grammar": lambda engine: constrained(engine, [1], LONG, Letters("abc", 9), timeout=1),
        "completions": lambda engine: engine.add_request([1], three, timeout=1),
    }[kind]
    engine = toy_engine(max_num_batched_tokens=16)
    request = add(engine)
    engine.step()
    clock.now += 1
    assert end_of(engine, request, drain(engine)) == ("timeout", "timeout")
    assert not engine.has_unfinished
    assert engine.block_manager.num_used == 0


def test_a_request_whose_grammar_is_being_compiled(clock: SimpleNamespace) -> None:
    engine = toy_engine()
    engine.grammars.submit = lambda constraint: Future()  # type: ignore[method-assign]
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a*"))
    request = engine.add_request([1], params, queue_timeout=1)
    assert engine.step() == []
    assert engine.stats().num_waiting_tokens == 1
    clock.now += 1
    assert end_of(engine, request, drain(engine)) == ("timeout", "queue_timeout")


def test_deadlines_of_ended_requests_are_forgotten(clock: SimpleNamespace) -> None:
    engine = toy_engine()
    for number in range(1000):
        engine.add_request([number % 60], SamplingParams(max_tokens=1), timeout=1000, queue_timeout=1000)
        drain(engine)
    gc.collect()
    engine.add_request([1], timeout=1000)
    assert len(engine.requests._deadlines._heap) <= 200


@pytest.mark.parametrize("name", ["timeout", "queue_timeout"])
@pytest.mark.parametrize("value", [0, -1.0, "1", float("nan"), float("inf"), True])
def test_other_limits_are_refused(name: str, value: Any) -> None:
    engine = toy_engine()
    for add in (engine.add_request, engine.add_embedding_request):
        with pytest.raises(RequestError, match=rf"{name} must be a number in \(0\.0, 1000000\.0\], got "):
            add([1], **{name: value})  # type: ignore[operator]
    with pytest.raises(RequestError, match=name):
        engine.add_beam_request([1], BeamSearchParams(beam_width=2), **{name: value})
