"""The limits on what may wait, and the ids of requests."""

import pytest
from support.toy import check_blocks, drain, greedy, toy_engine

from fastinfer import QueueFullError, RequestError, SamplingParams

LONG = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


def test_the_number_of_waiting_requests_is_limited() -> None:
    engine = toy_engine(max_num_waiting=2)
    for _ in range(2):
        engine.add_request([1], LONG)
    with pytest.raises(QueueFullError, match=r"^the queue is full: max_num_waiting=2 requests wait$"):
        engine.add_request([1], LONG)
    engine.step()
    engine.add_request([1], LONG)


def test_an_id_is_used_until_its_last_output_is_returned() -> None:
    engine = toy_engine()
    engine.add_request([1], LONG, request_id="x")
    engine.requests.fail(engine.requests.active["x"], RuntimeError("broken"))
    with pytest.raises(RequestError, match=r"^request_id must be new, got 'x', which is still running$"):
        engine.add_request([1], LONG, request_id="x")
    [output] = engine.step()
    assert (output.request_id, output.outputs[0].finish_reason) == ("x", "error")
    engine.add_request([1], LONG, request_id="x")
    assert len(drain(engine)["x"].outputs[0].token_ids) == 20


def test_waiting_tokens_are_limited() -> None:
    engine = toy_engine(max_num_seqs=1, max_num_waiting_tokens=30)
    engine.add_request([1] * 50, LONG)  # alone, it may be longer than the limit
    with pytest.raises(QueueFullError, match=r"50 tokens wait, max_num_waiting_tokens is 30, and the prompt has 1$"):
        engine.add_request([1])
    engine.step()
    requests = [engine.add_request([number] * 15, LONG) for number in (2, 3)]
    assert engine.stats().num_waiting_tokens == 30
    with pytest.raises(QueueFullError):
        engine.add_embedding_request([1])
    engine.abort(requests[0])
    requests[0] = engine.add_request([4] * 15, LONG)
    check_blocks(engine)
    outputs = drain(engine)
    assert engine.stats().num_waiting_tokens == 0
    for request, prompt in zip(requests, ([4] * 15, [3] * 15), strict=True):
        assert outputs[request].outputs[0].token_ids == greedy(prompt, 20, stop_at_eos=False)


def test_preempted_tokens_wait_too() -> None:
    engine = toy_engine(block_size=4, num_kv_blocks=24, max_num_seqs=3)
    for number in (1, 2, 3):
        engine.add_request([number] * 20, SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
    while not engine.stats().num_preemptions:
        engine.step()
        check_blocks(engine)
    assert engine.stats().num_waiting_tokens > 20
    drain(engine)
