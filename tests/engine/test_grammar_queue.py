"""Requests that wait for their grammars: late and failed ones, and their number of tokens."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from support.toy import drain, toy_engine
from support.toy_grammar import Letters

from fastinfer.engine.engine import Engine
from fastinfer.engine.grammar_queue import GrammarQueue
from fastinfer.errors import RequestError
from fastinfer.sampling_params import SamplingParams
from fastinfer.structured_output import StructuredOutputsParams

PROMPT = [3, 1, 4]
PARAMS = SamplingParams(seed=1, max_tokens=30, structured_outputs=StructuredOutputsParams(regex="a"))


def add(engine: Engine, request_id: str, **options: Any) -> Future[Any]:
    """Queue a request whose grammar is the returned future's."""
    grammar: Future[Any] = Future()
    engine.grammars.submit = lambda constraint: grammar  # type: ignore[method-assign]
    engine.add_request(PROMPT, PARAMS, request_id=request_id, **options)
    return grammar


def waiting(engine: Engine) -> tuple[int, int]:
    stats = engine.stats()
    return stats.num_waiting, stats.num_waiting_tokens


def test_the_counts_follow_the_requests() -> None:
    engine = toy_engine()
    grammars = [add(engine, str(index)) for index in range(4)]
    assert waiting(engine) == (4, 12)
    engine.abort("1")
    assert waiting(engine) == (3, 9)
    grammars[1].set_result(Letters("abc", 9))  # too late, of no interest
    grammars[2].set_exception(RequestError("no such grammar"))
    [failed] = engine.step()
    assert (failed.request_id, failed.outputs[0].stop_reason) == ("2", "no such grammar")
    assert waiting(engine) == (2, 6)
    for index in (0, 3):
        grammars[index].set_result(Letters("abc", 9))
    assert {name: len(output.outputs[0].text) for name, output in drain(engine).items()} == {"0": 9, "3": 9}
    assert waiting(engine) == (0, 0)


def test_a_grammar_is_not_taken_for_that_of_a_later_request_of_the_same_id() -> None:
    engine = toy_engine()
    first = add(engine, "x")
    engine.abort("x")
    second = add(engine, "x")
    first.set_result(Letters("abc", 2))
    assert engine.step() == []
    assert waiting(engine) == (1, 3)
    second.set_result(Letters("abc", 5))
    assert len(drain(engine)["x"].outputs[0].text) == 5


def test_a_grammar_that_comes_after_the_deadline() -> None:
    engine = toy_engine()
    grammar = add(engine, "x", queue_timeout=1e-9)
    grammar.set_result(Letters("abc", 2))
    [output] = engine.step()
    assert output.outputs[0].finish_reason == "timeout"
    assert waiting(engine) == (0, 0)
    assert not engine.has_unfinished


def test_after_a_fork_the_grammars_of_the_child_count() -> None:
    queue = GrammarQueue()
    request: Any = SimpleNamespace(request_id="x", sequences=[PROMPT])
    ended: Any = SimpleNamespace(request_id="y", sequences=[PROMPT])
    old: Future[Any] = Future()
    new: Future[Any] = Future()
    queue.add(request, old)
    queue.add(ended, Future())
    queue.discard("y")
    old.set_result("parent")
    queue.renew_after_fork(lambda request: new)
    assert list(queue.admit()) == []
    new.set_result("child")
    [(admitted, grammar)] = [(queue.discard("x"), grammar) for _, grammar in queue.admit()]
    assert admitted is None
    assert grammar.result() == "child"
    assert (len(queue), queue.num_tokens) == (0, 0)
