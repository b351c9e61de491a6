"""Faults at a share of the lines of a step, or with FASTINFER_CASES=all at every one.

Each one ends one request at most, the others give what they give alone, and all blocks are accounted for.
"""

import re
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.case_selection import share
from support.fake_cuda_graph import PaddedToy, use_fakes, use_graphs
from support.faults import ENGINE, Fault, Interrupt, Line, Tracer
from support.kv_files import GIB
from support.stages import use_stages
from support.state_toy import StateToy
from support.toy import VOCAB_SIZE, Forgetful, ToyModel, always_speculate, check_blocks, toy_engine
from support.toy_grammar import Letters, constrained

from fastinfer.engine.beam_request import BeamRequest
from fastinfer.engine.engine import Engine
from fastinfer.engine.generation_request import GenerationRequest
from fastinfer.outputs import PrefillOutput
from fastinfer.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from fastinfer.structured_output import StructuredOutputsParams

# Also ways to schedule, to compute and to store.
MODES = ["none", "ngram", "draft model", "runs ahead", "graphs", "offloading", "states", "stages"]
AHEAD_MODES = ("runs ahead", "graphs")


def prompt(number: int, length: int) -> list[int]:
    return [(7 * number + 3 * j) % (VOCAB_SIZE - 1) + 1 for j in range(length)]


# One request of each kind; those of length 9 begin alike.
REQUESTS: dict[str, Callable[[Engine], str]] = {
    "greedy": lambda engine: engine.add_request(prompt(1, 9), SamplingParams(temperature=0.0, max_tokens=14)),
    "sampled": lambda engine: engine.add_request(
        [*prompt(1, 9), 5],
        SamplingParams(n=2, seed=3, max_tokens=9, repetition_penalty=1.3, frequency_penalty=0.5, logit_bias={7: 2.0}),
    ),
    "logprobs": lambda engine: engine.add_request(
        prompt(2, 4),
        SamplingParams(seed=5, max_tokens=8, min_tokens=3, logprobs=2, prompt_logprobs=1, stop=["never"]),
        priority=1,
    ),
    "delta": lambda engine: engine.add_request(
        prompt(3, 3), SamplingParams(temperature=0.0, max_tokens=10, output_kind=RequestOutputKind.DELTA)
    ),
    "grammar": lambda engine: constrained(
        engine, prompt(4, 5), SamplingParams(seed=6, max_tokens=20), Letters("abc", 9)
    ),
    "grammar and logprobs": lambda engine: constrained(
        engine, prompt(8, 3), SamplingParams(seed=7, max_tokens=20, logprobs=0), Letters("abc", 6)
    ),
    "plain": lambda engine: engine.add_request(prompt(9, 3), SamplingParams(seed=8, max_tokens=12, ignore_eos=True)),
    "beams": lambda engine: engine.add_beam_request(prompt(5, 5), BeamSearchParams(beam_width=2, max_tokens=6)),
    "embedding": lambda engine: engine.add_embedding_request(prompt(6, 7)),
    "urgent": lambda engine: engine.add_request(
        prompt(7, 2), SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True), priority=-1
    ),
}


def make_engine(mode: str) -> Engine:
    """With few blocks, so that sequences are preempted and share and copy blocks."""
    engine = toy_engine(
        draft_model=Forgetful() if mode == "draft model" else None,
        model={"graphs": PaddedToy, "states": StateToy}.get(mode, ToyModel)(),
        num_speculative_tokens=3 if mode in ("ngram", "draft model", "states") else 0,
        async_scheduling=mode in AHEAD_MODES,
        kv_offloading_size=2**20 / GIB if mode in ("offloading", "states") else None,
        block_size=4,
        max_model_len=24,
        num_kv_blocks=9 if mode == "stages" else 14,
        max_num_batched_tokens=16,
        max_num_seqs=9,
    )
    if mode == "stages":
        return use_stages(engine, 3)
    if mode == "graphs":
        return use_graphs(engine)
    return always_speculate(engine) if engine.speculator else engine


class Results:
    """What came of the requests of one engine."""

    def __init__(self, engine: Engine, names: dict[str, str]) -> None:
        self.engine = engine
        self.names = names  # by request id
        self.last: dict[str, Any] = {}  # by name
        self.errors: list[BaseException] = []
        self.texts: dict[tuple[str, int], str] = {}  # by name and completion: the deltas together
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.num_finished: Counter[str] = Counter()

    def take(self, outputs: list[Any]) -> None:
        assert len({output.request_id for output in outputs}) == len(outputs)
        for output in outputs:
            name = self.names[output.request_id]
            self.last[name] = output
            self.num_finished[name] += output.finished
            for completion in getattr(output, "outputs", ()):
                key = name, completion.index
                self.texts[key] = self.texts.get(key, "") + completion.delta
                earlier = self.tokens.get(key, []) if name == "delta" else []
                self.tokens[key] = earlier + completion.token_ids

    def run(self, step: Callable[[], list[Any]]) -> "Results":
        """Step until all requests have ended; errors of whole steps are kept, and the next step goes on."""
        for _ in range(300):
            if not self.engine.has_unfinished:
                break
            try:
                outputs = step()
            except (Fault, Interrupt) as error:
                self.errors.append(error)
            else:
                self.take(outputs)
            check_blocks(self.engine)
        assert not self.engine.has_unfinished
        assert self.engine.block_manager.num_used == 0
        assert self.num_finished == Counter(self.names.values()), "each stream ends once"
        return self

    def state(self, name: str) -> Any:
        """Everything that a request must have from its parameters alone."""
        output = self.last[name]
        if isinstance(output, PrefillOutput):
            return output.finish_reason, [round(number, 9) for number in output.embedding or ()]
        completions = [
            (
                self.texts[name, c.index],
                self.tokens[name, c.index],
                c.finish_reason,
                c.stop_reason,
                [{t: round(p.logprob, 4) for t, p in entries.items()} for entries in c.logprobs or ()],
            )
            for c in output.outputs
        ]
        return completions, output.prompt_logprobs and len(output.prompt_logprobs)

    def failed(self, name: str) -> bool:
        output = self.last[name]
        if isinstance(output, PrefillOutput):
            return output.finish_reason == "error"
        return any(completion.finish_reason == "error" for completion in output.outputs)


# With any other one in a batch no step is launched before the last one is collected.
AHEAD = ("greedy", "delta", "plain", "embedding", "urgent")


def start(mode: str) -> Results:
    engine = make_engine(mode)
    names = AHEAD if mode in AHEAD_MODES else REQUESTS
    return Results(engine, {REQUESTS[name](engine): name for name in names})


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fakes(monkeypatch)


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """What each request gives by itself; speculation does not change it."""
    states = {}
    for name, add in REQUESTS.items():
        engine = make_engine("none")
        states[name] = Results(engine, {add(engine): name}).run(engine.step).state(name)
    return states


def check_fault(tracer: Tracer, mode: str, alone: dict[str, Any]) -> None:
    results = start(mode)
    results.run(lambda: tracer(results.engine.step))
    failed = [name for name in results.names.values() if results.failed(name)]
    assert len(failed) <= 1, (failed, tracer.line)
    for name in results.names.values():
        if name not in failed:
            assert results.state(name) == alone[name], (name, tracer.line, tracer.occurrence)
    if tracer.has_raised and tracer.error is Interrupt:
        assert results.errors, f"an interrupt was swallowed at {tracer.line}"
    if tracer.has_raised:
        stats = results.engine.stats()
        assert failed or results.errors or stats.num_failed_draws or stats.num_repairs, (
            f"a fault passed silently at {tracer.line}"
        )


@pytest.mark.parametrize("mode", MODES)
def test_without_faults(mode: str, alone: dict[str, Any]) -> None:
    results = start(mode)
    num_ahead = 0

    def step() -> list[Any]:
        nonlocal num_ahead
        outputs = results.engine.step()
        num_ahead += results.engine._step._launched is not None
        return outputs

    results.run(step)
    for name in results.names.values():
        assert results.state(name) == alone[name], name
    assert results.engine.stats().num_preemptions > 0 or mode in AHEAD_MODES
    assert (num_ahead > 5) == (mode in AHEAD_MODES)
    assert results.engine.stats().num_repairs == 0


@cache
def lines_of(mode: str) -> dict[Line, list[int]]:
    """The lines of the engine that run in a step, and in which step each time."""
    tracer = Tracer()
    results = start(mode)
    results.run(lambda: tracer(results.engine.step))
    return tracer.calls


@cache
def handles_errors(file: str) -> bool:
    return re.search(r"^ *(try|finally|except\b.*|with\b.*):", Path(file).read_text(), re.MULTILINE) is not None


@pytest.mark.slow
@pytest.mark.parametrize("error", [Fault, Interrupt])
@pytest.mark.parametrize("mode", MODES)
def test_a_fault_at_any_line(mode: str, error: type[BaseException], alone: dict[str, Any]) -> None:
    """Lines of the engine, each at its first, its last or another occurrence.

    Both errors occur at each line of a file that handles errors; elsewhere they take turns, as the same callers handle
    them. Lines that run in the modes before, too, are mostly tested there; here the errors take turns at every 14th.
    """
    lines = lines_of(mode)
    assert len(lines) > 500
    others = {line for other in MODES[: MODES.index(mode)] for line in lines_of(other)}
    step = str(Path(ENGINE, "step.py"))
    turn = 0 if error is Fault else 14
    for number, (line, calls) in share(list(enumerate(sorted(lines.items()))), 3):
        launches = mode in AHEAD_MODES and line[0] == step  # in another order than in any other mode
        if line in others and number % 28 != turn and not launches:
            continue
        if line not in others and not handles_errors(line[0]) and (number // 4 % 2 == 0) != (error is Fault):
            continue
        count = len(calls)
        index = (0, count - 1, number * 7919 % count)[number % 4 % 3]
        occurrence = index + 1 - calls.index(calls[index])  # within its step
        tracer = Tracer(line, occurrence, error, calls[index])
        check_fault(tracer, mode, alone)
        assert tracer.has_raised, f"{line} did not run again"


@pytest.mark.parametrize(
    ("kind", "method"),
    [(kind, method) for kind in (GenerationRequest, BeamRequest) for method in ("update", "end_step", "output")]
    + [(GenerationRequest, "mark_reported")],
)
@pytest.mark.parametrize("unable_to_finish", [False, True])
def test_a_request_that_always_fails_ends_alone(
    method: str, kind: type[Any], unable_to_finish: bool, alone: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    results = start("ngram")
    victim = {GenerationRequest: "sampled", BeamRequest: "beams"}[kind]
    request = next(r for i, r in results.engine.requests.active.items() if results.names[i] == victim)

    def broken(*args: object) -> None:
        raise ValueError("broken")

    for name in (method, "finish") if unable_to_finish else (method,):
        monkeypatch.setattr(request, name, broken)
    results.run(results.engine.step)
    assert [name for name in REQUESTS if results.failed(name)] == [victim]
    assert {c.stop_reason for c in results.last[victim].outputs} == {"ValueError: broken"}
    for name in REQUESTS.keys() - {victim}:
        assert results.state(name) == alone[name], name
    assert not results.errors


@pytest.mark.parametrize("error", [Fault, Interrupt])
def test_a_fault_while_a_request_is_aborted(error: type[BaseException], alone: dict[str, Any]) -> None:
    def run(tracer: Tracer, mode: str, victim: str) -> None:
        results = start(mode)
        for _ in range(2):
            results.take(results.engine.step())
        request_id = next(i for i, name in results.names.items() if name == victim)
        try:
            output = tracer(lambda: results.engine.abort(request_id))
        except (Fault, Interrupt):
            check_blocks(results.engine)
            output = results.engine.abort(request_id)
        if output is not None:
            results.take([output])
        results.run(results.engine.step)
        for name in set(results.names.values()) - {victim}:
            assert results.state(name) == alone[name], name
        reasons = {completion.finish_reason for completion in results.last[victim].outputs}
        assert reasons & {"abort", "error"}

    for mode, victim in (
        ("ngram", "sampled"),
        ("ngram", "beams"),
        ("ngram", "delta"),
        ("runs ahead", "plain"),
        ("states", "sampled"),
    ):
        tracer = Tracer()
        run(tracer, mode, victim)
        assert len(tracer.seen) > 30
        for line in share(sorted(tracer.seen), 3):
            run(Tracer(line, 1, error), mode, victim)


@pytest.mark.parametrize("error", [Fault, Interrupt])
def test_a_fault_while_grammars_arrive(error: type[BaseException], alone: dict[str, Any]) -> None:
    """One has been compiled before the step, one is of an aborted request, one comes later."""
    params = SamplingParams(seed=6, max_tokens=20, structured_outputs=StructuredOutputsParams(regex="a"))

    def run(tracer: Tracer) -> None:
        engine = make_engine("none")
        grammars: list[Future[Any]] = [Future() for _ in range(3)]
        unused = iter(grammars)
        engine.grammars.submit = lambda constraint: next(unused)  # type: ignore[method-assign]
        names = {REQUESTS["greedy"](engine): "greedy"}
        first, aborted, last = (engine.add_request(prompt(4, 5), params) for _ in grammars)
        engine.abort(aborted)
        for grammar in grammars[:2]:
            grammar.set_result(Letters("abc", 9))

        def step() -> list[Any]:
            has_first_ended = first not in engine.requests.active  # with its text or with the fault
            if has_first_ended and not grammars[2].done():
                grammars[2].set_result(Letters("abc", 9))
            return tracer(engine.step)

        names |= {first: "grammar", last: "another grammar"}
        results = Results(engine, names).run(step)
        failed = [name for name in names.values() if results.failed(name)]
        assert len(failed) <= 1
        for name in set(names.values()) - set(failed):
            assert results.state(name) == alone["greedy" if name == "greedy" else "grammar"], (name, tracer.line)
        assert (engine.requests.num_waiting, engine.requests.num_waiting_tokens) == (0, 0)

    tracer = Tracer()
    run(tracer)
    files = {str(Path(ENGINE, name)) for name in ("grammar_queue.py", "waiting_requests.py", "request_table.py")}
    lines = sorted(line for line in tracer.seen if line[0] in files)
    assert len(lines) > 30
    for line in share(lines, 2):
        for occurrence in {1, tracer.seen[line]}:
            run(Tracer(line, occurrence, error))


@pytest.mark.parametrize("error", [Fault, Interrupt])
def test_a_fault_while_a_request_is_added(error: type[BaseException], alone: dict[str, Any]) -> None:
    def run(tracer: Tracer) -> None:
        engine = make_engine("none")
        names = {REQUESTS["greedy"](engine): "greedy"}
        engine.step()
        try:
            names[tracer(lambda: REQUESTS["sampled"](engine))] = "sampled"
        except (Fault, Interrupt):
            check_blocks(engine)
        results = Results(engine, names)
        results.run(engine.step)
        for name in names.values():
            if name == "sampled":
                assert results.state(name) == alone[name]
            else:
                assert results.last[name].outputs[0].token_ids == alone[name][0][0][1]

    tracer = Tracer()
    run(tracer)
    assert len(tracer.seen) > 30
    for line in share(sorted(tracer.seen), 2):
        run(Tracer(line, 1, error))
