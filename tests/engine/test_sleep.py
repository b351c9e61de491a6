"""A sleeping engine: what it frees, what it refuses, and that nothing else can be told afterwards."""

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.families import load, save_model
from support.mixed_decoder import CONFIG, mixed_decoder
from support.peft_adapter import write_adapter
from support.toy import VOCAB_SIZE, ToyModel, ToyTokenizer, check_blocks, drain, greedy, prompts, toy_engine
from torch import Tensor

from fastinfer.engine.config import EngineConfig
from fastinfer.engine.cpu_graphs import CPUGraphs
from fastinfer.engine.engine import Engine
from fastinfer.errors import RequestError, UnavailableError
from fastinfer.models import Model
from fastinfer.models.offload import HostCopy, tensors_of
from fastinfer.sampling_params import BeamSearchParams, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, seed=5, max_tokens=9, ignore_eos=True)


def load_models() -> list[Model]:
    """Always the same weights, for the model and for the draft model."""
    return [mixed_decoder("cpu"), mixed_decoder("cpu")]


def decoder_engine(with_draft_model: bool = False, **limits: Any) -> Engine:
    """An engine that records graphs, and that can load its models again."""
    model, draft = load_models()
    config = EngineConfig(block_size=8, num_kv_blocks=40, max_num_seqs=4, **limits)
    return Engine(
        model,
        ToyTokenizer(),  # type: ignore[arg-type]
        config,
        draft if with_draft_model else None,
        load_models=lambda: load_models()[: 1 + with_draft_model],
        fingerprint="weights",
    )


def serve(engine: Engine, adapter: str | None = None) -> list[tuple[list[int], str | None]]:
    """Greedy and sampled requests; their tokens and how they ended."""
    ids = [
        engine.add_request([5 * i % VOCAB_SIZE for i in range(length)], params, adapter=adapter)
        for length in (3, 21)
        for params in (GREEDY, SAMPLED)
    ]
    outputs = drain(engine)
    check_blocks(engine)
    return [(outputs[i].outputs[0].token_ids, outputs[i].outputs[0].finish_reason) for i in ids]


def references(tensors: Iterator[Tensor]) -> list[weakref.ref[Tensor]]:
    return [weakref.ref(tensor) for tensor in tensors]


def alive(tensors: list[weakref.ref[Tensor]]) -> int:
    gc.collect()
    return sum(tensor() is not None for tensor in tensors)


def cached(engine: Engine) -> Iterator[Tensor]:
    return (tensor for worker in engine._workers for layer in worker.kv_cache for tensor in layer.tensors)


def results_of(engine: Engine) -> Iterator[Tensor]:
    """The tensors that recorded steps write."""
    for worker in engine._workers:
        assert isinstance(worker.runner.graphs, CPUGraphs)
        for _, result in worker.runner.graphs.recorded.values():
            yield from (result.hidden, result.logits)


def poison(engine: Engine) -> None:
    for tensor in cached(engine):
        tensor.view(torch.uint8).fill_(0xFF)  # NaN


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("with_draft_model", [False, True], ids=["alone", "draft model"])
def test_memory_is_freed_and_the_texts_stay_the_same(level: int, with_draft_model: bool) -> None:
    engine = decoder_engine(with_draft_model, num_speculative_tokens=3 * with_draft_model)
    expected = serve(engine)
    assert list(results_of(engine))
    for _ in range(2):
        kv, weights = references(cached(engine)), references(tensors_of(engine.model))
        results = references(results_of(engine))
        assert alive(kv) == len(kv) == 6 * (1 + with_draft_model)
        engine.sleep(level)
        assert engine.stats().is_sleeping
        assert alive(kv) == alive(results) == 0
        assert alive(weights) == (len(weights) if level == 1 else 0)
        assert engine.stats().num_free_blocks == engine.block_manager.num_blocks
        engine.wake_up()
        assert not engine.stats().is_sleeping
        poison(engine)
        assert serve(engine) == expected
    assert list(results_of(engine))


def test_a_draft_model_is_dropped_too() -> None:
    engine = decoder_engine(with_draft_model=True, num_speculative_tokens=3)
    weights = references(tensors_of([worker.model for worker in engine._workers]))
    engine.sleep(2)
    assert alive(weights) == 0


def test_memory_does_not_wait_for_the_garbage_collector() -> None:
    """Runners and their graphs refer to each other."""
    engine = decoder_engine()
    serve(engine)
    gc.collect()
    model = weakref.ref(engine.model)
    gc.disable()
    try:
        engine.sleep(2)
        assert model() is None
    finally:
        gc.enable()


def test_nothing_is_found_in_the_prefix_cache() -> None:
    engine = toy_engine(block_size=4)
    prompt = list(range(1, 20))
    engine.add_request(prompt, GREEDY)
    drain(engine)
    engine.sleep(1)
    assert engine.stats().num_cached_blocks == 0
    engine.wake_up()
    request_id = engine.add_request(prompt, GREEDY)
    output = drain(engine)[request_id]
    assert output.num_cached_tokens == 0
    assert output.outputs[0].token_ids == greedy(prompt, 9, stop_at_eos=False)


def test_requests_are_refused_while_it_sleeps() -> None:
    engine = toy_engine()
    engine.sleep(1)
    message = r"the engine sleeps until wake_up\(\) is called"
    for add in (
        lambda: engine.add_request([1], GREEDY),
        lambda: engine.add_beam_request([1], BeamSearchParams(beam_width=2, max_tokens=2)),
        lambda: engine.add_embedding_request([1]),
        lambda: engine.pin_prompt("a", [1]),
    ):
        with pytest.raises(UnavailableError, match=message):
            add()
    assert not engine.has_unfinished
    assert engine.step() == []
    engine.wake_up()
    engine.add_request([1], GREEDY)
    assert drain(engine)["request-0"].outputs[0].token_ids == greedy([1], 9, stop_at_eos=False)


def test_what_is_refused() -> None:
    engine = toy_engine()
    for level in (0, 3, True, "1"):
        with pytest.raises(RequestError, match=rf"level must be .*got {level!r}"):
            engine.sleep(level)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="level must be 1 for an engine that cannot load its models again, got 2"):
        engine.sleep(2)
    engine.add_request([1], GREEDY)
    with pytest.raises(RequestError, match="sleep needs an engine without unfinished requests, got 1"):
        engine.sleep(1)
    drain(engine)
    engine.wake_up()  # does nothing
    engine.sleep(1)
    with pytest.raises(RequestError, match="the engine sleeps already"):
        engine.sleep(1)
    engine.wake_up()


def test_sleeping_while_a_step_in_vain_is_still_launched() -> None:
    """It belongs to a request that has ended."""
    stop = greedy([9, 4], 6, stop_at_eos=False)[3]
    engine = toy_engine(async_scheduling=True)
    engine.add_request([9, 4], SamplingParams(temperature=0.0, max_tokens=9, stop_token_ids=[stop]))
    drain(engine)
    engine.sleep(1)
    engine.wake_up()
    request_id = engine.add_request([9, 4], GREEDY)
    assert drain(engine)[request_id].outputs[0].token_ids == greedy([9, 4], 9, stop_at_eos=False)


def test_pinned_prompts_are_computed_anew() -> None:
    engine = toy_engine(block_size=4)
    module = list(range(1, 23))
    engine.pin_prompt("system", module, cache_salt="salt")
    engine.pin_prompt("gone", [1, 2, 3, 4, 5])
    drain(engine)
    engine.sleep(1)
    assert engine.stats().num_used_blocks == 0
    assert engine.pinned_prompt("system").token_ids == module
    engine.unpin_prompt("gone")
    check_blocks(engine)
    engine.wake_up()
    assert not engine.has_unfinished
    check_blocks(engine)
    assert engine.stats().num_used_blocks == 6
    request_id = engine.add_request([*module, 40], GREEDY, cache_salt="salt")
    output = drain(engine)[request_id]
    assert output.num_cached_tokens == 20
    assert output.outputs[0].token_ids == greedy([*module, 40], 9, stop_at_eos=False)
    engine.unpin_prompt("system")
    assert engine.stats().num_used_blocks == 0


def test_a_pinned_prompt_that_cannot_be_computed_again() -> None:
    engine = toy_engine(block_size=4)
    for name in ("a", "b"):
        engine.pin_prompt(name, [*range(1, 23), ord(name) % VOCAB_SIZE])
    drain(engine)
    engine.sleep(1)
    engine.model.fail = True  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="the model broke"):
        engine.wake_up()
    engine.model.fail = False  # type: ignore[attr-defined]
    assert not engine.is_sleeping
    assert not engine.has_unfinished
    assert engine.pinned_prompts.sequences == []
    assert engine.stats().num_used_blocks == 0
    check_blocks(engine)
    engine.add_request([1], GREEDY, request_id="after")
    assert drain(engine)["after"].outputs[0].token_ids == greedy([1], 9, stop_at_eos=False)


@pytest.mark.parametrize("level", [1, 2])
def test_adapters_stay_loaded(level: int, tmp_path: Path) -> None:
    write_adapter(tmp_path, CONFIG, 4)
    engine = decoder_engine(max_loras=1, max_lora_rank=8)
    engine.load_adapter("a", tmp_path)
    expected = serve(engine, "a")
    assert expected != serve(engine)
    engine.sleep(level)
    engine.wake_up()
    assert serve(engine, "a") == expected


def test_an_engine_that_cannot_wake_up_sleeps_on() -> None:
    calls = []

    def fails_once() -> list[Model]:
        calls.append(1)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("out of memory")
        return load_models()[:1]

    engine = Engine(mixed_decoder("cpu"), ToyTokenizer(), EngineConfig(num_kv_blocks=9), load_models=fails_once)  # type: ignore[arg-type]
    expected = serve(engine)
    engine.sleep(2)
    with pytest.raises(torch.OutOfMemoryError):
        engine.wake_up()
    assert engine.stats().is_sleeping
    engine.wake_up()
    assert serve(engine) == expected


def test_the_files_hold_another_model() -> None:
    other = replace(mixed_decoder("cpu"), config=replace(CONFIG, vocab_size=7))
    engine = Engine(mixed_decoder("cpu"), ToyTokenizer(), EngineConfig(num_kv_blocks=9), load_models=lambda: [other])  # type: ignore[arg-type]
    engine.sleep(2)
    with pytest.raises(RequestError, match="the files must hold the model that was loaded first"):
        engine.wake_up()
    assert engine.stats().is_sleeping


def test_weights_that_are_loaded_again_count_as_others() -> None:
    """The files may have changed meanwhile; answers that were stored for the old weights must not be found."""
    engine = decoder_engine()
    found = [engine.fingerprint]
    for level in (1, 2, 2):
        engine.sleep(level)
        engine.wake_up()
        found.append(engine.fingerprint)
    assert found[0] == found[1] == decoder_engine().fingerprint != ""
    assert len(set(found)) == 3


def test_weights_move_to_host_memory_and_back() -> None:
    """Their tensors stay what they are, so that nobody who holds them has to be told."""
    model = mixed_decoder("cpu")
    before = [tensor.clone() for tensor in tensors_of(model)]
    tensors = list(tensors_of(model))
    # On a CPU only some of a model's memory can be freed in place; on a GPU all of it can.
    own = [tensor.clone() for tensor in tensors]
    shared = own[0].view(-1)[1:]
    copy = HostCopy([*own, shared])
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in own)
    copy.restore()
    assert all(map(torch.equal, own, before))
    assert torch.equal(shared, own[0].view(-1)[1:])
    assert shared.untyped_storage().data_ptr() == own[0].untyped_storage().data_ptr()


def test_all_tensors_of_a_model_are_found() -> None:
    """Those of each form of weight, once each."""
    found = [id(tensor) for tensor in tensors_of(mixed_decoder("cpu"))]
    assert len(found) == len(set(found))
    model = mixed_decoder("cpu")
    ids = {id(tensor) for tensor in tensors_of(model)}
    gc.collect()
    attention, mlp = model.layers[2].attention, model.layers[2].mlp
    assert {id(attention.cos_sin_cache), id(attention.norm.weight), id(mlp.down.weight.qweight)} <= ids  # type: ignore[attr-defined]
    assert {id(part.scales) for part in attention.qkv.parts} <= ids  # type: ignore[attr-defined]


@pytest.mark.parametrize("family", ["qwen3.5", "lfm2-moe", "granite-hybrid", "nemotron-h", "deepseek-v3", "mistral4"])
def test_all_tensors_of_other_layers_are_found(family: str, tmp_path: Path) -> None:
    """Layers with states, latent attention and experts: nothing that loading leaves in memory is missed."""
    save_model(tmp_path, family)
    gc.collect()
    before = {id(item) for item in gc.get_objects() if isinstance(item, Tensor)}
    model = load(tmp_path)
    gc.collect()
    found = {tensor.untyped_storage().data_ptr() for tensor in tensors_of(model)}
    loaded = [item for item in gc.get_objects() if isinstance(item, Tensor) and id(item) not in before]
    assert len(loaded) > 5 * model.config.num_layers
    assert {tensor.untyped_storage().data_ptr() for tensor in loaded} <= found


def test_a_toy_wakes_up_with_requests_in_between() -> None:
    engine = toy_engine(model=ToyModel(), block_size=3)
    for round_ in range(3):
        for prompt in prompts(4):
            engine.add_request(prompt, GREEDY, request_id=f"{round_} {len(prompt)}")
        outputs = drain(engine)
        for prompt in prompts(4):
            tokens = outputs[f"{round_} {len(prompt)}"].outputs[0].token_ids
            assert tokens == greedy(prompt, 9, stop_at_eos=False)
        engine.sleep(1)
        engine.wake_up()
