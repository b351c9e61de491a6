"""More LoRA adapters than slots: which are loaded when, who waits for them, and that no text changes."""

import asyncio
import contextlib
import itertools
import os
import threading
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.case_selection import share
from support.faults import ENGINE, Fault, Interrupt, Tracer
from support.peft_adapter import write_adapter
from support.tiny_decoder import CONFIG, make_decoder
from support.toy import VOCAB_SIZE, ToyTokenizer, check_blocks, drain

from fastinfer import AsyncEngine
from fastinfer.engine import adapters, deadlines
from fastinfer.engine.config import EngineConfig
from fastinfer.engine.engine import Engine
from fastinfer.errors import AdapterError, RequestError
from fastinfer.formats.peft import LoraAdapter, read_adapter
from fastinfer.models.lora import AdapterSlots, PreparedAdapter
from fastinfer.sampling_params import SamplingParams

SIZES = replace(CONFIG, vocab_size=VOCAB_SIZE)
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPT = [3, 1, 4, 1, 5]
NAMES = "abcde"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(NAMES):
        write_adapter(folder / name, SIZES, rank=3 + seed, seed=seed, size=2.0)
    return {name: folder / name for name in NAMES}


class Watched(AdapterSlots):
    """Fails if a slot is replaced while an unfinished request uses it."""

    engine: Engine
    loaded: list[int]

    def load(self, slot: int, adapter: PreparedAdapter) -> None:
        used = {s.adapter for request in self.engine.requests.active.values() for s in request.sequences}
        assert slot not in used, "a running request's adapter was replaced"
        self.loaded.append(slot)
        super().load(slot, adapter)


def make_engine(**limits: Any) -> Engine:
    config = EngineConfig(kv_cache_dtype=torch.float32, lora_dtype=torch.float32, **{"max_loras": 2, **limits})
    engine = Engine(make_decoder(SIZES), ToyTokenizer(), config)  # type: ignore[arg-type]
    slots = engine.adapters.slots
    slots.__class__, slots.engine, slots.loaded = Watched, engine, []  # type: ignore[assignment, union-attr]
    return engine


def register_all(engine: Engine, folders: dict[str, Path]) -> Engine:
    for name, folder in folders.items():
        engine.register_adapter(name, folder)
    return engine


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str | None, list[int]]:
    """What each adapter answers to the prompt, alone."""
    answers = {}
    for name in (None, *NAMES):
        engine = make_engine(max_loras=1, enforce_eager=True)
        if name is not None:
            engine.load_adapter(name, folders[name])
        request_id = engine.add_request(PROMPT, PARAMS, adapter=name)
        answers[name] = drain(engine)[request_id].outputs[0].token_ids
    assert len({tuple(tokens) for tokens in answers.values()}) == len(answers)
    return answers


def tokens(outputs: dict[str, Any], ids: list[str]) -> list[list[int]]:
    return [outputs[request_id].outputs[0].token_ids for request_id in ids]


class Files:
    """The adapters' files: those of held names are read only once they are released."""

    def __init__(self) -> None:
        self.read: list[str] = []
        self._held: dict[str, threading.Event] = {}

    def hold(self, *names: str) -> None:
        self._held |= {name: threading.Event() for name in names}

    def release(self, name: str) -> None:
        self._held.pop(name).set()

    def __call__(self, path: Path) -> LoraAdapter:
        self.read.append(path.name)
        if path.name in self._held:
            assert self._held[path.name].wait(60)
        return read_adapter(path)


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> Files:
    files = Files()
    monkeypatch.setattr(adapters, "read_adapter", files)
    return files


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("max_cpu_loras", [1, 2, 9])
def test_more_adapters_than_slots(
    max_cpu_loras: int, async_scheduling: bool, folders: dict[str, Path], expected: dict[str | None, list[int]]
) -> None:
    engine = make_engine(max_cpu_loras=max_cpu_loras, async_scheduling=async_scheduling)
    register_all(engine, folders)
    names = [None, *"abcdeabcde", None, *"aabbccddee"]
    ids = [engine.add_request(PROMPT, PARAMS, adapter=name) for name in names]
    outputs = drain(engine)
    check_blocks(engine)
    assert tokens(outputs, ids) == [expected[name] for name in names]
    assert engine.stats().num_adapter_loads >= 5
    assert len(engine.adapters._in_memory) <= max_cpu_loras
    assert not engine.requests.awaiting_adapter._groups, "each step would look through them"


ACTIONS = ["add"] * 4 + ["step"] * 8 + ["abort", "unload"]


@settings(deadline=None, max_examples=int(os.environ.get("FASTINFER_TRACES", "40")))
@given(data=st.data())
def test_random_traces(folders: dict[str, Path], expected: dict[str | None, list[int]], data: st.DataObject) -> None:
    """FASTINFER_TRACES is the number of traces."""
    draw = data.draw
    engine = make_engine(
        max_loras=draw(st.integers(1, 3)),
        max_cpu_loras=draw(st.integers(1, 3)),
        max_num_seqs=draw(st.integers(1, 4)),
        max_num_batched_tokens=draw(st.sampled_from([3, 64])),
        async_scheduling=draw(st.booleans()),
        enable_prefix_caching=draw(st.booleans()),
        block_size=4,
        num_kv_blocks=16 + draw(st.integers(0, 6)),
    )
    register_all(engine, folders)
    names: dict[str, str | None] = {}
    finished: dict[str, Any] = {}

    def step() -> None:
        for output in engine.step():
            assert output.request_id not in finished
            if output.finished:
                finished[output.request_id] = output
        check_blocks(engine)

    for action in draw(st.lists(st.sampled_from(ACTIONS), max_size=60)):
        if action == "add":
            name = draw(st.sampled_from([None, *NAMES]))
            priority = draw(st.sampled_from([0, 0, 1]))
            names[engine.add_request(PROMPT, PARAMS, adapter=name, priority=priority)] = name
        elif action == "step":
            step()
        elif action == "abort" and names:
            request_id = draw(st.sampled_from(sorted(names)))
            if (output := engine.abort(request_id)) is not None:
                finished[request_id] = output
        elif action == "unload":
            name = draw(st.sampled_from(NAMES))
            if name not in {names[request_id] for request_id in names if request_id not in finished}:
                engine.unload_adapter(name)
                engine.register_adapter(name, folders[name])
    while engine.has_unfinished:
        step()
    for request_id, name in names.items():
        completion = finished[request_id].outputs[0]
        if completion.finish_reason == "abort":
            assert completion.token_ids == expected[name][: len(completion.token_ids)]
        else:
            assert completion.token_ids == expected[name]
    assert engine.block_manager.num_used == 0


def names_in_slots(engine: Engine) -> list[str]:
    return sorted(map(engine.adapters.name, engine.adapters._in_slot))


def test_the_least_recently_used_adapter_makes_room(folders: dict[str, Path], files: Files) -> None:
    engine = register_all(make_engine(max_cpu_loras=3), folders)

    def run(name: str) -> list[str]:
        engine.add_request(PROMPT, PARAMS, adapter=name)
        drain(engine)
        return names_in_slots(engine)

    assert [run(name) for name in "abab"] == [["a"], ["a", "b"], ["a", "b"], ["a", "b"]]
    assert run("c") == ["b", "c"], "a was used before b"
    assert run("b") == ["b", "c"]
    assert run("a") == ["a", "b"], "c was used before b"
    assert files.read == ["a", "b", "c"], "three are kept in host memory"
    assert run("d") == ["a", "d"]
    assert files.read == ["a", "b", "c", "d"]
    assert engine.stats().num_adapter_loads == 5


def test_nobody_waits_for_another_one_s_files(
    folders: dict[str, Path], files: Files, expected: dict[str | None, list[int]]
) -> None:
    engine = register_all(make_engine(), folders)
    files.hold("a")
    waits = engine.add_request(PROMPT, PARAMS, adapter="a")
    others = [engine.add_request(PROMPT, PARAMS, adapter=name) for name in (None, "b", "c", None)]
    finished: dict[str, Any] = {}
    while len(finished) < 4:
        finished |= {output.request_id: output for output in engine.step() if output.finished}
        assert engine.stats().num_waiting >= 1
    assert tokens(finished, others) == [expected[name] for name in (None, "b", "c", None)]
    assert engine.stats().num_waiting_tokens == len(PROMPT)
    files.release("a")
    assert tokens(drain(engine), [waits]) == [expected["a"]]


def test_a_request_without_a_slot_is_overtaken_only_so_often(folders: dict[str, Path]) -> None:
    """Requests of both loaded adapters keep coming, so that a slot would never be free."""
    engine = register_all(make_engine(max_num_seqs=3), folders)
    for name in "ab":
        engine.add_request(PROMPT, PARAMS, adapter=name)
    while len(names_in_slots(engine)) < 2:
        engine.step()
    waits = engine.add_request(PROMPT, PARAMS, adapter="c")
    names = itertools.cycle("ab")
    end = time.monotonic() + 60  # a thread reads the adapter's files, and may have to wait for a core
    while not any(output.request_id == waits and output.finished for output in engine.step()):
        assert time.monotonic() < end, "the request starved"
        if engine.stats().num_waiting < 20:
            engine.add_request(PROMPT, PARAMS, adapter=next(names))
    drain(engine)
    assert len(names_in_slots(engine)) == 2


def test_as_many_overtake_as_may_run(folders: dict[str, Path]) -> None:
    engine = make_engine(max_loras=1, max_cpu_loras=9, max_num_seqs=3)
    for name in "ab":
        engine.load_adapter(name, folders[name])
    names = {engine.add_request(PROMPT, PARAMS, adapter="a"): "a"}
    engine.step()
    names |= {engine.add_request(PROMPT, PARAMS, adapter=name): name for name in "baaaaaa"}
    order = []
    while engine.has_unfinished:
        order += [names[output.request_id] for output in engine.step() if output.finished]
    assert "".join(order) == "aaaabaaa", "three of the later ones have come first"


def test_priority_decides_who_gets_a_slot(folders: dict[str, Path]) -> None:
    engine = make_engine(max_loras=1, max_cpu_loras=9)
    for name in "abc":
        engine.load_adapter(name, folders[name])
    names = {
        engine.add_request(PROMPT, PARAMS, adapter=name, priority=p): name
        for name, p in zip("abc", (1, 1, 0), strict=True)
    }
    order = []
    while engine.has_unfinished:
        order += [names[output.request_id] for output in engine.step() if output.finished]
    assert order == ["c", "a", "b"]


def test_the_most_urgent_request_decides_for_its_adapter(folders: dict[str, Path]) -> None:
    engine = make_engine(max_loras=1, max_cpu_loras=9)
    for name in "abc":
        engine.load_adapter(name, folders[name])
    names = {engine.add_request(PROMPT, PARAMS, adapter="a"): "a"}
    engine.step()
    for name, priority in (("b", 2), ("c", 1), ("b", 0)):
        names[engine.add_request(PROMPT, PARAMS, adapter=name, priority=priority)] = name
    order = []
    while engine.has_unfinished:
        order += [names[output.request_id] for output in engine.step() if output.finished]
    assert order == ["a", "b", "b", "c"]


def test_an_adapter_that_cannot_be_read_ends_its_requests_alone(
    folders: dict[str, Path], expected: dict[str | None, list[int]], tmp_path: Path
) -> None:
    engine = register_all(make_engine(), folders)
    engine.register_adapter("missing", tmp_path / "missing")
    write_adapter(tmp_path / "wide", SIZES, rank=65)
    engine.register_adapter("wide", tmp_path / "wide")
    names = ["missing", "a", "wide", None, "missing", "b"]
    ids = [engine.add_request(PROMPT, PARAMS, adapter=name) for name in names]
    outputs = drain(engine)
    check_blocks(engine)
    for request_id, name in zip(ids, names, strict=True):
        completion = outputs[request_id].outputs[0]
        if name in ("missing", "wide"):
            assert completion.finish_reason == "error"
            assert str(tmp_path / name) in str(completion.stop_reason)
        else:
            assert completion.token_ids == expected[name]
    write_adapter(tmp_path / "missing", SIZES, rank=3, seed=0, size=2.0)  # it may come later
    request_id = engine.add_request(PROMPT, PARAMS, adapter="missing")
    assert tokens(drain(engine), [request_id]) == [expected["a"]]


def test_an_error_while_an_adapter_is_copied(
    folders: dict[str, Path], expected: dict[str | None, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = register_all(make_engine(max_loras=1), folders)
    load = Watched.load

    def fail(self: Watched, slot: int, adapter: PreparedAdapter) -> None:
        load(self, slot, adapter)
        if adapter.path.name == "b":
            raise RuntimeError("out of memory")

    monkeypatch.setattr(Watched, "load", fail)
    ids = [engine.add_request(PROMPT, PARAMS, adapter=name) for name in ("a", "b", "c", None)]
    outputs = drain(engine)
    assert outputs[ids[1]].outputs[0].finish_reason == "error"
    assert "out of memory" in str(outputs[ids[1]].outputs[0].stop_reason)
    assert [tokens(outputs, [ids[i]])[0] for i in (0, 2, 3)] == [expected[name] for name in ("a", "c", None)]


@pytest.mark.slow
@pytest.mark.parametrize("error", [Fault, Interrupt])
def test_a_fault_at_any_line(
    error: type[BaseException], folders: dict[str, Path], expected: dict[str | None, list[int]]
) -> None:
    names = [None, "a", "b", "a", "c"]
    files = tuple(f"{ENGINE}/{name}.py" for name in ("adapters", "adapter_queue", "request_table"))

    def run(tracer: Tracer) -> None:
        engine = register_all(make_engine(max_loras=1, max_cpu_loras=1, enforce_eager=True), folders)
        ids = [engine.add_request(PROMPT, PARAMS, adapter=name) for name in names]
        outputs: deque[Any] = deque()
        for _ in range(10_000):
            with contextlib.suppress(Fault, Interrupt):
                tracer(lambda: engine.step_into(outputs))
            check_blocks(engine)
            if not engine.has_unfinished:
                break
        last = {output.request_id: output.outputs[0] for output in outputs}
        failed = [request_id for request_id in ids if last[request_id].finish_reason == "error"]
        # An adapter that cannot be taken over ends all of its requests.
        assert len({names[ids.index(request_id)] for request_id in failed}) <= tracer.has_raised, tracer.line
        for request_id, name in zip(ids, names, strict=True):
            assert request_id in failed or last[request_id].token_ids == expected[name], tracer.line
        assert len(engine.requests.awaiting_adapter) == engine.requests.awaiting_adapter.num_tokens == 0

    tracer = Tracer()
    run(tracer)
    lines = [line for line in sorted(tracer.seen) if line[0] in files]
    assert len(lines) > 100
    for number, line in share(list(enumerate(lines)), 3):
        run(Tracer(line, 1 + number * 7919 % tracer.seen[line], error))


def test_files_that_change_are_not_mixed_with_what_was_read(
    expected: dict[str | None, list[int]], folders: dict[str, Path], tmp_path: Path
) -> None:
    """The prefix cache may still hold keys and values of the old ones."""
    write_adapter(tmp_path / "x", SIZES, rank=3, seed=0, size=2.0)
    engine = register_all(make_engine(max_loras=1, max_cpu_loras=1), folders)
    engine.register_adapter("x", tmp_path / "x")
    for name in "xb":
        engine.add_request(PROMPT, PARAMS, adapter=name)
        drain(engine)
    write_adapter(tmp_path / "x", SIZES, rank=4, seed=1, size=2.0)
    request_id = engine.add_request(PROMPT, PARAMS, adapter="x")
    completion = drain(engine)[request_id].outputs[0]
    assert completion.finish_reason == "error"
    assert "must not change" in str(completion.stop_reason)
    engine.unload_adapter("x")
    engine.load_adapter("x", tmp_path / "x")
    request_id = engine.add_request(PROMPT, PARAMS, adapter="x")
    assert tokens(drain(engine), [request_id]) == [expected["b"]]


def test_a_request_that_waits_can_end(folders: dict[str, Path], files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(deadlines, "time", type("Clock", (), {"perf_counter": staticmethod(lambda: now)}))
    engine = register_all(make_engine(), folders)
    files.hold("a")
    ids = [engine.add_request(PROMPT, PARAMS, adapter="a", queue_timeout=limit) for limit in (None, 5.0)]
    assert engine.step() == []
    with pytest.raises(RequestError, match="adapter 'a' must not be in use to be unloaded, got 2 requests"):
        engine.unload_adapter("a")
    aborted = engine.abort(ids[0])
    assert aborted is not None
    assert aborted.outputs[0].finish_reason == "abort"
    now = 6.0
    [late] = engine.step()
    assert late.request_id == ids[1]
    assert late.outputs[0].finish_reason == "timeout"
    assert not engine.has_unfinished
    engine.unload_adapter("a")
    files.release("a")


def test_an_event_loop_registers_adapters(
    folders: dict[str, Path], expected: dict[str | None, list[int]], tmp_path: Path
) -> None:
    async def answer(engine: AsyncEngine, name: str) -> list[int]:
        outputs = [output async for output in engine.generate(PROMPT, PARAMS, adapter=name)]
        return outputs[-1].outputs[0].token_ids

    async def main() -> None:
        async with AsyncEngine(make_engine()) as engine:
            for name, folder in folders.items():
                await engine.register_adapter(name, folder)
            with pytest.raises(RequestError, match="must be new"):
                await engine.register_adapter("a", tmp_path)
            with pytest.raises(AdapterError):
                await engine.load_adapter("f", tmp_path)
            assert engine.adapters == list(NAMES)
            assert await asyncio.gather(*(answer(engine, name) for name in NAMES)) == [expected[n] for n in NAMES]

    asyncio.run(asyncio.wait_for(main(), 120))


def test_a_forked_child_reads_again_what_the_parent_was_reading(
    folders: dict[str, Path], files: Files, expected: dict[str | None, list[int]]
) -> None:
    engine = make_engine()
    engine.register_adapter("a", folders["a"])
    files.hold("a")
    request_id = engine.add_request(PROMPT, PARAMS, adapter="a")
    engine.step()
    held = files._held.pop("a")
    engine.adapters.renew_after_fork()  # the parent's thread does not end here
    assert tokens(drain(engine), [request_id]) == [expected["a"]]
    assert files.read == ["a", "a"]
    held.set()
