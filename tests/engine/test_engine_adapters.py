"""Requests with different adapters in one engine: each as if alone."""

import asyncio
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.peft_adapter import write_adapter
from support.tiny_decoder import CONFIG, make_decoder
from support.toy import VOCAB_SIZE, ToyTokenizer, check_blocks, drain

from fastinfer import AsyncEngine
from fastinfer.engine import adapters
from fastinfer.engine.config import EngineConfig
from fastinfer.engine.engine import Engine
from fastinfer.errors import AdapterError, RequestError
from fastinfer.formats.peft import LoraAdapter, read_adapter
from fastinfer.sampling_params import BeamSearchParams, SamplingParams

SIZES = replace(CONFIG, vocab_size=VOCAB_SIZE)
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, n=2)
PROMPTS = [[(7 * i + 3 * j) % VOCAB_SIZE for j in range(3 + 5 * i % 23)] for i in range(6)]
NAMES = [None, "a", "b", "a", None, "b"]


def make_engine(**limits: Any) -> Engine:
    config = EngineConfig(kv_cache_dtype=torch.float32, lora_dtype=torch.float32, **{"max_loras": 2, **limits})
    return Engine(make_decoder(SIZES), ToyTokenizer(), config)  # type: ignore[arg-type]


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    for seed, name in enumerate("abc"):
        write_adapter(tmp_path / name, SIZES, rank=3 + seed, seed=seed, size=2.0)
    return {name: tmp_path / name for name in "abc"}


def complete(engine: Engine, prompts: list[list[int]], names: list[str | None]) -> list[list[int]]:
    ids = [engine.add_request(p, PARAMS, adapter=name) for p, name in zip(prompts, names, strict=True)]
    outputs = drain(engine)
    check_blocks(engine)
    return [outputs[request_id].outputs[0].token_ids for request_id in ids]


def alone(folders: dict[str, Path], name: str | None, prompt: list[int]) -> list[int]:
    engine = make_engine(enforce_eager=True, enable_prefix_caching=False)
    if name is not None:
        engine.load_adapter(name, folders[name])
    return complete(engine, [prompt], [name])[0]


def test_adapters_are_read_outside_the_engine_s_thread(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps go on while files are read: the first request ends although the adapter's files are not read yet."""
    has_ended = threading.Event()

    def slowly(path: Path) -> LoraAdapter:
        assert has_ended.wait(30)
        return read_adapter(path)

    async def load(engine: AsyncEngine) -> list[int]:
        loading = asyncio.create_task(engine.load_adapter("a", folders["a"]))
        outputs = [output async for output in engine.generate(PROMPTS[1], PARAMS)]
        has_ended.set()
        await loading
        assert [c.token_ids for c in outputs[-1].outputs] == [alone(folders, None, PROMPTS[1])] * 2
        outputs = [output async for output in engine.generate(PROMPTS[1], PARAMS, adapter="a")]
        return outputs[-1].outputs[0].token_ids

    async def main() -> None:
        async with AsyncEngine(make_engine()) as engine:
            assert await asyncio.wait_for(load(engine), 60) == alone(folders, "a", PROMPTS[1])

    monkeypatch.setattr(adapters, "read_adapter", slowly)
    asyncio.run(main())


@pytest.mark.parametrize("limits", [{}, {"enforce_eager": True}, {"max_num_batched_tokens": 5, "block_size": 4}])
def test_many_adapters_in_one_batch(limits: dict[str, Any], folders: dict[str, Path]) -> None:
    engine = make_engine(**limits)
    for name in ("b", "a"):
        engine.load_adapter(name, folders[name])
    expected = [alone(folders, name, prompt) for name, prompt in zip(NAMES, PROMPTS, strict=True)]
    assert complete(engine, PROMPTS, NAMES) == expected
    assert complete(engine, PROMPTS, NAMES) == expected, "with what the cache has now"
    assert len({tuple(alone(folders, name, PROMPTS[3])) for name in (None, "a", "b")}) == 3
    assert engine.stats().num_hit_tokens > 0 or engine.config.block_size == 32


@pytest.mark.parametrize("limits", [{}, {"max_num_batched_tokens": 5, "block_size": 4}])
def test_beams_and_embeddings_have_adapters(limits: dict[str, Any], folders: dict[str, Path]) -> None:
    """A beam search of width 1 is greedy decoding; an embedding is as that of a model which has one adapter alone."""
    engine = make_engine(**limits)
    for name in ("b", "a"):
        engine.load_adapter(name, folders[name])
    prompt, names = PROMPTS[3], (None, "a", "b")
    beams = [engine.add_beam_request(prompt, BeamSearchParams(1, 12, ignore_eos=True), adapter=name) for name in names]
    vectors = [engine.add_embedding_request(prompt, adapter=name) for name in names]
    with pytest.raises(RequestError, match="must not be in use to be unloaded, got 2"):
        engine.unload_adapter("a")
    outputs = drain(engine)
    check_blocks(engine)
    assert [outputs[b].outputs[0].token_ids for b in beams] == [alone(folders, name, prompt) for name in names]
    embeddings = [tuple(outputs[vector].embedding) for vector in vectors]
    assert len(set(embeddings)) == 3
    for name, embedding in zip(names, embeddings, strict=True):
        engine = make_engine(enforce_eager=True)
        if name is not None:
            engine.load_adapter(name, folders[name])
        request_id = engine.add_embedding_request(prompt, adapter=name)
        assert tuple(drain(engine)[request_id].embedding) == pytest.approx(embedding, abs=1e-5)
    with pytest.raises(RequestError, match="'c'"):
        engine.add_beam_request(prompt, BeamSearchParams(1, 12), adapter="c")
    with pytest.raises(RequestError, match="'c'"):
        engine.add_embedding_request(prompt, adapter="c")


def test_prefixes_are_not_shared_between_adapters_or_loads(folders: dict[str, Path]) -> None:
    engine = make_engine(block_size=4)
    prompt = PROMPTS[4]
    for name, folder in (("a", "a"), ("b", "b"), ("a", "c")):  # the third gives another adapter an old name
        engine.load_adapter(name, folders[folder])
        for _ in range(2):
            request_id = engine.add_request(prompt, PARAMS, adapter=name)
            output = drain(engine)[request_id]
        assert output.num_cached_tokens > 0
        assert output.outputs[0].token_ids == alone({name: folders[folder]}, name, prompt)
        first = engine.block_manager.num_hit_tokens
        engine.unload_adapter(name)
        assert first == engine.block_manager.num_hit_tokens


def test_a_pinned_prompt_of_an_adapter(folders: dict[str, Path]) -> None:
    engine = make_engine(block_size=4)
    module = PROMPTS[3][:9]
    for name in ("a", "b"):
        engine.load_adapter(name, folders[name])
    engine.pin_prompt("module", module, adapter="a")
    drain(engine)
    for name, num_cached_tokens in (("a", 8), ("b", 0), (None, 0)):
        request_id = engine.add_request(PROMPTS[3], PARAMS, adapter=name)
        output = drain(engine)[request_id]
        assert output.num_cached_tokens == num_cached_tokens
        assert output.outputs[0].token_ids == alone(folders, name, PROMPTS[3])
    with pytest.raises(RequestError, match="got 1 requests or pinned prompts"):
        engine.unload_adapter("a")
    engine.unpin_prompt("module")
    engine.unload_adapter("a")
    check_blocks(engine)
    with pytest.raises(RequestError, match="adapter must be one of"):
        engine.pin_prompt("module", module, adapter="a")


def test_an_adapter_that_comes_later_runs_in_recorded_steps(folders: dict[str, Path]) -> None:
    engine = make_engine()
    engine.load_adapter("a", folders["a"])
    complete(engine, [PROMPTS[1]], ["a"])
    num_graphs = len(engine.worker.runner.graphs.recorded)
    assert num_graphs > 0
    engine.load_adapter("b", folders["b"])
    assert complete(engine, [PROMPTS[1]], ["b"]) == [alone(folders, "b", PROMPTS[1])]
    assert len(engine.worker.runner.graphs.recorded) == num_graphs
    complete(engine, [PROMPTS[1]], [None])
    assert len(engine.worker.runner.graphs.recorded) > num_graphs, "without adapters there is nothing to add"


def test_load_and_unload(folders: dict[str, Path], tmp_path: Path) -> None:
    engine = make_engine()
    engine.load_adapter("a", folders["a"])
    with pytest.raises(RequestError, match="adapter name must be new, got 'a'"):
        engine.load_adapter("a", folders["b"])
    with pytest.raises(AdapterError):
        engine.load_adapter("b", tmp_path / "nothing")
    engine.load_adapter("b", folders["b"])
    request_id = engine.add_request([1, 2], PARAMS, adapter="a")
    engine.step()
    with pytest.raises(RequestError, match="adapter 'a' must not be in use to be unloaded, got 1 requests or"):
        engine.unload_adapter("a")
    engine.abort(request_id)
    engine.unload_adapter("a")
    engine.load_adapter("c", folders["c"])
    for call in (engine.unload_adapter, lambda name: engine.add_request([1], adapter=name)):
        with pytest.raises(RequestError, match=r"adapter must be one of \['b', 'c'\], got 'a'"):
            call("a")
    assert not engine.has_unfinished


def test_files_that_vanish_before_an_adapter_is_loaded(folders: dict[str, Path]) -> None:
    engine = make_engine()
    adapter = engine.read_adapter(folders["a"])
    shutil.rmtree(folders["a"])
    with pytest.raises(AdapterError, match=r"a/adapter_config.json must stay as long as the adapter: No such file"):
        engine.load_adapter("a", adapter)
    assert engine.adapters.names == []


def test_an_adapter_stays_if_the_one_that_replaces_it_vanishes(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files vanish after they were read, as when a deployment renews the folder at that moment."""

    def vanishing(path: Path) -> LoraAdapter:
        adapter = read_adapter(path)
        shutil.rmtree(path)
        return adapter

    async def main() -> None:
        async with AsyncEngine(make_engine(max_loras=1)) as engine:
            await engine.load_adapter("x", folders["a"])
            await engine.load_adapter("x", folders["b"], replace=True)
            with monkeypatch.context() as patch:
                patch.setattr(adapters, "read_adapter", vanishing)
                with pytest.raises(AdapterError, match=r"c/adapter_config.json must stay as long as the adapter"):
                    await engine.load_adapter("x", folders["c"], replace=True)
            assert engine.adapters == ["x"]
            outputs = [output async for output in engine.generate(PROMPTS[1], PARAMS, adapter="x")]
            assert outputs[-1].outputs[0].token_ids == alone(folders, "b", PROMPTS[1])
            await engine.load_adapter("new", folders["a"], replace=True)
            assert engine.adapters == ["new", "x"]

    asyncio.run(main())


def test_a_pinned_prompt_whose_adapter_cannot_be_read_again(folders: dict[str, Path]) -> None:
    """Sleep loses the blocks; the adapter has made room for another one."""
    engine = make_engine(max_loras=1, max_cpu_loras=1)
    for name in "ab":
        engine.load_adapter(name, folders[name])
        engine.pin_prompt(name, PROMPTS[3], adapter=name)
        drain(engine)
    shutil.rmtree(folders["a"])
    engine.sleep(1)
    with pytest.raises(RuntimeError, match=r"could not be computed again and are lost: \{'a': .*expected a folder"):
        engine.wake_up()
    assert not engine.is_sleeping
    assert not engine.has_unfinished
    assert engine.pinned_prompt("b").token_ids == PROMPTS[3]
    with pytest.raises(RequestError, match=r"pinned prompt must be one of \['b'\], got 'a'"):
        engine.pinned_prompt("a")
    check_blocks(engine)


def test_an_engine_without_slots(folders: dict[str, Path]) -> None:
    engine = make_engine(max_loras=0)
    with pytest.raises(RequestError, match="adapters need max_loras of at least 1, got 0"):
        engine.load_adapter("a", folders["a"])
    with pytest.raises(RequestError, match=r"adapter must be one of \[\], got 'a'"):
        engine.add_request([1], adapter="a")
