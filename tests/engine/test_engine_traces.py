"""Random traces: requests of all kinds come, are aborted, refused, preempted and finish, in a cache that is mostly too
small. Every text must be what the request alone would give, and every block accounted for in every step. In half of the
traces the kernels compute prompts differently than generated tokens, and the engine is deterministic; in another half
the model has states; in some of the others it is divided into stages."""

import contextlib
import os
import tempfile
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.faults import Fault, Interrupt, Tracer
from support.kv_files import GIB, wait_for_files
from support.stages import chunks_in_flight, has_stages, use_stages
from support.state_toy import StateRoleToy, StateToy
from support.toy import (
    NUM_LAYERS,
    VOCAB_SIZE,
    Forgetful,
    ForgetfulRoleToy,
    LastRowsRoleToy,
    RoleToy,
    ToyModel,
    always_speculate,
    check_blocks,
    drain,
    toy_engine,
)
from support.toy_grammar import Letters, constrained
from torch import Tensor

from fastinfer.engine import deadlines, kv_cache_size
from fastinfer.engine import engine as engine_module
from fastinfer.engine.engine import Engine
from fastinfer.engine.sequence import Sequence, SequenceState
from fastinfer.errors import QueueFullError, RequestError
from fastinfer.outputs import PrefillOutput
from fastinfer.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams

ACTIONS = ["add", "add", "add", "embed", "module", "unpin", "step", "step", "step", "step", "step", "abort", "clock"]
ACTIONS += ["turn", "fault", "fault at a line", "sleep", "reset"]
CUT_SHORT = {"abort", "timeout", "error"}
# Lines of the engine that a step runs through, by order of magnitude.
MAX_LINES = 600


def shift(tokens: Any, logits: Tensor) -> None:
    """A logits processor whose result depends on all generated tokens."""
    logits[sum(tokens) % VOCAB_SIZE] += 3.0


class Request:
    """A request that can be made of any engine, and what it gives alone."""

    def __init__(self, draw: Any, prompt: list[int], max_completions: int) -> None:
        self.prompt = prompt
        kind = draw(
            st.sampled_from(["greedy", "greedy", "sampled", "rules", "grammar", "logprobs", "processor", "beams"])
        )
        fields: dict[str, Any] = {"temperature": 0.0, "max_tokens": draw(st.integers(1, 20))}
        if kind != "greedy":
            fields |= {"seed": draw(st.integers(0, 9)), "temperature": 1.0}
        if kind == "sampled":
            fields |= {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "logit_bias": {7: 2.0}}
        if kind == "rules":
            fields |= {"allowed_token_ids": [0, *range(1, 60)], "bad_words": ["a", "bc", "def"], "min_tokens": 1}
        if kind == "logprobs":
            fields |= {"logprobs": 1, "prompt_logprobs": 0, "stop": ["ab"], "include_stop_str_in_output": True}
        if kind == "processor":
            fields |= {"logits_processors": [shift]}
        fields["n"] = draw(st.integers(1, max_completions))
        if kind == "beams":
            fields["logprobs"] = None
        fields["output_kind"] = draw(st.sampled_from(list(RequestOutputKind)))
        self.params = SamplingParams(**fields)
        self.grammar = Letters("abc", draw(st.integers(1, 9))) if kind == "grammar" else None
        self.beams = None
        if kind == "beams":
            self.beams = BeamSearchParams(beam_width=self.params.n, max_tokens=self.params.max_tokens or 1)

    def add(self, engine: Engine, **options: Any) -> str:
        if self.beams is not None:
            return engine.add_beam_request(self.prompt, self.beams, **options)
        if self.grammar is not None:
            return constrained(engine, self.prompt, self.params, self.grammar, **options)
        return engine.add_request(self.prompt, self.params, **options)

    def alone(self, engine: Engine) -> "Texts":
        texts = Texts(self)
        self.add(engine)
        while engine.has_unfinished:
            for output in engine.step():
                texts.take(output)
        return texts


class Texts:
    """The texts and tokens of a request's completions, from outputs of any kind."""

    def __init__(self, request: Request) -> None:
        params = request.params
        self.is_search = request.beams is not None  # which has one output
        self.is_delta = params.output_kind is RequestOutputKind.DELTA and not self.is_search
        self.texts = [""] * params.n
        self.token_ids: list[list[int]] = [[] for _ in range(params.n)]
        self.logprobs: list[list[Any]] = [[] for _ in range(params.n)]
        self.reasons: list[str | None] = [None] * params.n
        self.finished = False

    def take(self, output: Any) -> None:
        assert not self.finished, "an output after the last one"
        self.finished = output.finished
        for completion in output.outputs:
            index = completion.index
            self.texts[index] += completion.delta
            kept = self.token_ids[index] if self.is_delta else []
            self.token_ids[index] = kept + completion.token_ids
            kept = self.logprobs[index] if self.is_delta else []
            entries = [{t: round(p.logprob, 4) for t, p in e.items()} for e in completion.logprobs or ()]
            self.logprobs[index] = kept + entries
            self.reasons[index] = completion.finish_reason
            assert self.is_delta or completion.text == self.texts[index]

    def check(self, expected: "Texts") -> None:
        """Equal, or a beginning for those that were cut short; a search that was has the best texts so far."""
        if self.is_search and {None, *CUT_SHORT} & set(self.reasons):
            return
        for index, reason in enumerate(self.reasons):
            pairs = [
                (self.texts[index], expected.texts[index]),
                (self.token_ids[index], expected.token_ids[index]),
                (self.logprobs[index], expected.logprobs[index]),
            ]
            if reason in CUT_SHORT:
                pairs = [(got, whole[: len(got)]) for got, whole in pairs]  # type: ignore[index]
            else:
                assert reason == expected.reasons[index]
            for got, wanted in pairs:
                assert got == wanted


def draw_engine(draw: Any, folder: str, kind: type[ToyModel]) -> Callable[[], Engine]:
    """A function that makes engines of the same kind, which may keep their cache in the folder."""
    block_size = draw(st.integers(1, 5))
    max_model_len = draw(st.integers(4, 40))
    fewest = -(-max_model_len // block_size)
    speculation = draw(st.sampled_from(["none", "ngram", "draft model"]))
    windows = draw(st.tuples(*[st.sampled_from([0, 0, 1, 3, 8])] * NUM_LAYERS))
    has_prefix_cache = draw(st.booleans())
    stores = draw(st.sampled_from(["none", "host", "disk", "both"])) if has_prefix_cache else "none"
    block_bytes = block_size * NUM_LAYERS * 2 * 4 * (1 + (speculation == "draft model"))
    if issubclass(kind, StateToy):  # whose snapshots may be larger
        block_bytes = max(block_bytes, 40)
    limits: dict[str, Any] = {}
    if stores in ("host", "both"):
        limits["kv_offloading_size"] = draw(st.integers(1, 3 * fewest)) * block_bytes / GIB
    if stores in ("disk", "both"):
        limits["kv_offloading_dir"] = folder
        limits["kv_offloading_dir_size"] = draw(st.integers(1, 9 * fewest)) * (block_bytes + 200) / GIB
    limits |= {
        "num_speculative_tokens": 0 if speculation == "none" else draw(st.integers(1, 4)),
        "block_size": block_size,
        "max_model_len": max_model_len,
        "num_kv_blocks": draw(st.integers(fewest, 2 * fewest)),
        "max_num_batched_tokens": draw(st.sampled_from([1, 2, 7, 64])),
        "max_num_seqs": draw(st.integers(1, 6)),
        "max_num_waiting": draw(st.integers(1, 8)),
        "enable_prefix_caching": has_prefix_cache,
        "async_scheduling": draw(st.booleans()),
        "deterministic": issubclass(kind, RoleToy),
    }

    num_stages = draw(st.sampled_from([1, 1, 2, 3])) if stores == "none" else 1
    if num_stages > 1:
        limits["async_scheduling"] = False
    draft_kind = ForgetfulRoleToy if issubclass(kind, RoleToy) else Forgetful

    def make() -> Engine:
        engine = toy_engine(
            model=kind(windows), draft_model=draft_kind() if speculation == "draft model" else None, **limits
        )
        if num_stages > 1:
            engine = use_stages(engine, num_stages)
        return engine if speculation == "none" else always_speculate(engine)

    return make


@settings(deadline=None, max_examples=int(os.environ.get("FASTINFER_TRACES", "100")))
@given(data=st.data())
def test_random_traces(data: st.DataObject) -> None:
    """FASTINFER_TRACES is the number of traces; 10,000 of them take about 10^5 steps."""
    draw = data.draw
    clock = SimpleNamespace(now=0.0)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(deadlines, "time", SimpleNamespace(perf_counter=lambda: clock.now))
        kind = draw(st.sampled_from([ToyModel, RoleToy, LastRowsRoleToy, StateToy, StateRoleToy]))
        patch.setattr(engine_module, "roles_differ", lambda device, exact: issubclass(kind, RoleToy))
        num_states = draw(st.integers(1, 12))
        patch.setattr(kv_cache_size, "_num_states", lambda config, state_bytes, memory: num_states * (state_bytes > 0))
        run_trace(draw, draw_engine(draw, folder, kind), clock)


def run_trace(draw: Any, make_engine: Callable[[], Engine], clock: SimpleNamespace) -> None:
    engine = make_engine()
    max_model_len, max_num_seqs = engine.max_model_len, engine.config.max_num_seqs
    stem = draw(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=max_model_len - 2))
    requests: dict[str, Request] = {}
    texts: dict[str, Texts] = {}

    def prompt() -> list[int]:
        """Often one that begins as others do."""
        return continued(stem[: draw(st.integers(0, len(stem)))])

    def next_turn() -> list[int]:
        """The next turn of a chat, whose last answer is a part of the prompt now."""
        earlier = draw(st.sampled_from(sorted(requests)))
        while not texts[earlier].finished:
            step(engine, take)
        return continued((requests[earlier].prompt + texts[earlier].token_ids[0])[: max_model_len - 2])

    def continued(start: list[int]) -> list[int]:
        return start + draw(
            st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=max_model_len - 1 - len(start))
        )

    def take(output: Any) -> None:
        if output.request_id in texts:
            texts[output.request_id].take(output)

    for action in draw(st.lists(st.sampled_from(ACTIONS), max_size=60)):
        is_full = engine.stats().num_waiting >= engine.config.max_num_waiting  # more after a preemption
        if action in ("add", "turn", "embed", "module") and is_full:
            with pytest.raises(QueueFullError):
                engine.add_request([1])
        elif action == "add" or (action == "turn" and requests):
            request = Request(draw, next_turn() if action == "turn" else prompt(), min(3, max_num_seqs))
            options: dict[str, Any] = {
                "cache_salt": draw(st.sampled_from(["", "", "salt"])),
                "priority": draw(st.sampled_from([0, 0, 0, 1, -1])),
                "timeout": draw(st.sampled_from([None, None, 3.0])),
                "queue_timeout": draw(st.sampled_from([None, None, 2.0])),
            }
            request_id = request.add(engine, **options)
            requests[request_id], texts[request_id] = request, Texts(request)
        elif action == "embed":
            engine.add_embedding_request(prompt(), pooling=draw(st.sampled_from(["mean", "last"])))
        elif action == "module":
            with contextlib.suppress(RequestError):  # no room, or no prefix cache
                engine.pin_prompt(draw(st.sampled_from("ab")), prompt())
        elif action == "unpin":
            with contextlib.suppress(RequestError):
                engine.unpin_prompt(draw(st.sampled_from("ab")))
        elif action == "abort" and requests:
            request_id = draw(st.sampled_from(sorted(requests)))
            output = engine.abort(request_id)
            assert (output is None) == texts[request_id].finished
            assert engine.abort(request_id) is None
            if output is not None:
                take(output)
        elif action == "clock":
            clock.now += 1.0
        elif action in ("fault", "sleep") and has_stages(engine):
            continue  # after an error of the model the ranks have ended; and they do not sleep
        elif action == "fault":
            engine.model.fail = True  # type: ignore[attr-defined]
            with contextlib.suppress(RuntimeError):
                step(engine, take)
            engine.model.fail = False  # type: ignore[attr-defined]
            check_blocks(engine)
        elif action == "fault at a line":
            error = draw(st.sampled_from([Fault, Interrupt]))
            with contextlib.suppress(Fault, Interrupt):
                outputs: deque[Any] = deque()
                try:
                    Tracer(None, draw(st.integers(1, MAX_LINES)), error)(partial(engine.step_into, outputs))
                finally:
                    for output in outputs:
                        take(output)
            check_blocks(engine)
        elif action == "sleep":
            while engine.has_unfinished:
                step(engine, take)
            engine.sleep(1)
            engine.wake_up()
            check_blocks(engine)
        elif action == "reset":
            engine.reset_prefix_cache()
            check_blocks(engine)
        elif action == "step":
            step(engine, take)
    while engine.has_unfinished:
        step(engine, take)

    # With a cache on disk the next process, in which each request runs alone, begins with what this one has computed.
    restarted = make_engine() if engine.config.kv_offloading_dir is not None else None
    for request_id, request in requests.items():
        assert texts[request_id].finished
        windows, kind = engine.model.windows, type(engine.model)  # type: ignore[attr-defined]
        model = kind() if 0 in windows or issubclass(kind, StateToy) else kind(windows)
        expected = request.alone(toy_engine(model=model, max_model_len=max_model_len))
        texts[request_id].check(expected)
        if restarted is not None:
            request.alone(restarted).check(expected)
            check_blocks(restarted)
            flush(restarted)
    for name in "ab":
        with contextlib.suppress(RequestError):
            engine.unpin_prompt(name)
    assert engine.block_manager.num_used == 0
    assert engine.block_manager.num_free + engine.block_manager.num_cached == engine.block_manager.num_blocks


def step(engine: Engine, take: Callable[[Any], None]) -> None:
    """One step, after which the books balance; somebody gets further, unless a batch waits for company.

    With stages, beams take turns. If the one that is ahead is preempted for the other, that step brings nobody further.
    """
    before, lengths, num_preemptions = reached(engine), longest(engine), engine.stats().num_preemptions
    outputs = engine.step()
    for output in outputs:
        take(output)
    check_blocks(engine)
    flush(engine)  # so that the trace does not depend on the writer's speed
    assert len({output.request_id for output in outputs}) == len(outputs)
    progress: list[Any] = [s for s, place in reached(engine).items() if place > before.get(s, (0, 0))]
    # The beams of a search that goes on may all have to wait, longer by a token than those of the last round.
    progress += [name for name, length in longest(engine).items() if length > lengths.get(name, length)]
    ended = [s for s in before if s.state is SequenceState.FINISHED]  # perhaps without an output of its own
    preempted = has_stages(engine) and engine.stats().num_preemptions > num_preemptions
    assert outputs or progress or ended or preempted or not before, "nobody got further"


def flush(engine: Engine) -> None:
    """Wait for the blocks that are being written to disk."""
    if engine.offloading is not None and engine.offloading.disk is not None:
        wait_for_files(engine.offloading.disk)


def reached(engine: Engine) -> dict[Sequence, tuple[int, int]]:
    """Tokens of each running sequence, and how many of them are computed for certain: not those of a launched step."""
    launched = engine._step._launched
    chunks = [] if launched is None else launched.chunks
    chunks = [*chunks, *chunks_in_flight(engine)]
    unsure: Counter[Sequence] = Counter()
    for chunk in chunks:
        if chunk.num_restarts == chunk.sequence.num_restarts:
            unsure[chunk.sequence] += chunk.num_tokens
    return {s: (len(s), s.num_computed_tokens - unsure[s]) for s in engine.scheduler.running}


def longest(engine: Engine) -> dict[str, int]:
    """Length of the longest sequence of each request."""
    unfinished = {name: request.unfinished for name, request in engine.requests.active.items()}
    return {name: max(map(len, sequences)) for name, sequences in unfinished.items() if sequences}


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_embeddings_are_the_same_in_any_company(pooling: str) -> None:
    prompts = [[(7 * i + 3 * j) % VOCAB_SIZE for j in range(1 + 5 * i % 23)] for i in range(6)]

    def embed(engine: Engine, prompt: list[int]) -> PrefillOutput:
        request_id = engine.add_embedding_request(prompt, pooling=pooling)
        return drain(engine)[request_id]

    alone = [embed(toy_engine(), prompt).embedding for prompt in prompts]
    engine = toy_engine(block_size=2, num_kv_blocks=26, max_model_len=48, max_num_batched_tokens=5)
    for prompt in prompts:
        engine.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    for _ in range(2):
        ids = [engine.add_embedding_request(prompt, pooling=pooling) for prompt in prompts]
        outputs = drain(engine)
        for request_id, expected in zip(ids, alone, strict=True):
            assert outputs[request_id].embedding == pytest.approx(expected, abs=1e-12)
    assert engine.stats().num_preemptions > 0


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_an_embedding_that_is_preempted_half_way_begins_anew(pooling: str) -> None:
    prompt = list(range(1, 31))
    alone = toy_engine()
    request_id = alone.add_embedding_request(prompt, pooling=pooling)
    expected = drain(alone)[request_id].embedding
    engine = toy_engine(block_size=2, num_kv_blocks=24, max_model_len=48, max_num_batched_tokens=2)
    engine.add_request([1] * 10, SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    for _ in range(5):
        engine.step()
    request_id = engine.add_embedding_request(prompt, pooling=pooling)
    while not engine.stats().num_preemptions:
        engine.step()
    assert drain(engine)[request_id].embedding == pytest.approx(expected, abs=1e-12)
