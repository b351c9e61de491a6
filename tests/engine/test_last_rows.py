"""Layers that store nothing are computed for wanted rows alone, without changing a bit of what is wanted."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import mixed_decoder
from support.fake_cuda_graph import PaddedToy, use_fakes, use_graphs
from support.peft_adapter import write_adapter
from support.random_checkpoint import RandomCheckpoint, int8
from support.toy import (
    VOCAB_SIZE,
    LastRowsToy,
    ToyTokenizer,
    always_speculate,
    check_blocks,
    drain,
    first_prompt_row,
    toy_engine,
)
from torch import Tensor

from fastinfer import ops
from fastinfer.engine import engine as engine_module
from fastinfer.engine.config import EngineConfig
from fastinfer.engine.engine import Engine
from fastinfer.models.config import KVShape, ModelConfig, Precision
from fastinfer.models.decoder import Decoder, DecoderLayer
from fastinfer.models.loader import load_decoder
from fastinfer.sampling_params import BeamSearchParams, SamplingParams

# The last two layers read the keys and values of the first two.
CONFIG = replace(
    mixed_decoder.CONFIG,
    num_layers=4,
    windows=(8, 0, 8, 0),
    kv_shapes=(KVShape(2, 64), KVShape(1, 128), KVShape(2, 64), KVShape(1, 128)),
    kv_layers=(0, 1, 0, 1),
    qk_norm="head",
    per_layer_size=32,
)
PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=2)
PROMPTS = [[(5 * i + 3 * j) % VOCAB_SIZE for j in range(length)] for i, length in enumerate((1, 6, 50, 13, 36))]


def make_engine(**limits: Any) -> Engine:
    model = load_decoder(RandomCheckpoint(CONFIG, lambda _, values: int8(values)), Precision.of("auto"), None)
    sizes = {"block_size": 8, "num_kv_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 32}
    config = EngineConfig(**{**sizes, "deterministic": True, **limits})
    engine = Engine(model, ToyTokenizer(), config)  # type: ignore[arg-type]
    for tensor in (tensor for cache in engine.worker.kv_cache for tensor in cache.tensors):
        tensor.view(torch.uint8).fill_(0xFF)  # NaN
    return always_speculate(engine) if engine.speculator is not None else engine


def rows_of_layers(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The number of rows of each layer, in each step that runs operator by operator."""
    found: list[list[int]] = []
    forward, call = Decoder.forward, DecoderLayer.__call__

    def noted_forward(model: Decoder, *args: Any) -> Tensor:
        found.append([])
        return forward(model, *args)

    def noted_call(layer: DecoderLayer, x: Tensor, *args: Any) -> Tensor:
        found[-1].append(len(x))
        return call(layer, x, *args)

    monkeypatch.setattr(Decoder, "forward", noted_forward)
    monkeypatch.setattr(DecoderLayer, "__call__", noted_call)
    return found


ADD: dict[str, tuple[Callable[[Engine], str], list[list[int]]]] = {
    "text": (
        lambda engine: engine.add_request(list(range(40)), replace(PARAMS, max_tokens=3)),
        [[32, 32], [8, 8, 1, 1], [1] * 4, [1] * 4],
    ),
    "log-probabilities": (
        lambda engine: engine.add_request(list(range(40)), replace(PARAMS, max_tokens=1, prompt_logprobs=1)),
        [[32] * 4, [8] * 4],
    ),
    "the mean": (lambda engine: engine.add_embedding_request(list(range(40))), [[32] * 4, [8] * 4]),
    "the last": (
        lambda engine: engine.add_embedding_request(list(range(40)), pooling="last"),
        [[32, 32], [8, 8, 1, 1]],
    ),
    "a pinned prompt": (lambda engine: engine.pin_prompt("module", list(range(40))), [[32, 32], [8, 8]]),
}


@pytest.mark.parametrize(("add", "expected"), ADD.values(), ids=ADD)
def test_rows(add: Callable[[Engine], str], expected: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    found = rows_of_layers(monkeypatch)
    engine = make_engine(enforce_eager=True)
    add(engine)
    drain(engine)
    assert found == expected


def test_drafts_are_verified_in_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    found = rows_of_layers(monkeypatch)
    engine = make_engine(enforce_eager=True, num_speculative_tokens=3)
    engine.add_request([1, 2, 3] * 4, replace(PARAMS, max_tokens=12))
    drain(engine)
    assert found[0] in ([12, 12, 1, 1], [15, 15, 4, 4])
    assert any(rows == [4] * 4 for rows in found[1:]), "drafts of the text itself"
    assert all(len(set(rows)) == 1 for rows in found[1:])


def serve(engine: Engine, adapters: list[Path]) -> list[Any]:
    """The results of requests of all kinds, and what the cache has in the end."""
    for folder in adapters:
        engine.load_adapter(folder.name, folder)
    names = [None, *(folder.name for folder in adapters)]
    outputs: list[Any] = []
    for params in (PARAMS, replace(PARAMS, prompt_logprobs=2), replace(PARAMS, n=3, temperature=0.9, seed=5)):
        ids = [engine.add_request(p, params, adapter=names[i % len(names)]) for i, p in enumerate(PROMPTS)]
        ids.append(engine.add_embedding_request(PROMPTS[2], pooling="last"))
        ids.append(engine.add_embedding_request(PROMPTS[4], adapter=names[-1]))
        ids.append(engine.add_beam_request(PROMPTS[3], BeamSearchParams(2, max_tokens=4), adapter=names[-1]))
        last = drain(engine)
        check_blocks(engine)
        for request_id in ids:
            output = last[request_id]
            texts = [(c.token_ids, c.logprobs, c.cumulative_logprob) for c in getattr(output, "outputs", [])]
            outputs.append((texts, getattr(output, "embedding", None), getattr(output, "prompt_logprobs", None)))
    outputs += [tensor.view(torch.uint8).tolist() for cache in engine.worker.kv_cache for tensor in cache.tensors]
    return outputs


def softened(layer: DecoderLayer, x: Tensor, *args: Any) -> Tensor:
    """A layer that computes the tokens of prompts in another way."""
    hidden, first = CALL(layer, x, *args), first_prompt_row()
    if first < len(hidden):
        ops.softcap(hidden[first:], 4.0)
    return hidden


CALL = DecoderLayer.__call__


@pytest.mark.parametrize(
    ("limits", "happened"),
    [
        ({}, "num_hit_tokens"),
        ({"enforce_eager": True, "max_num_batched_tokens": 11}, "num_eager_steps"),
        ({"num_kv_blocks": 10, "max_model_len": 72}, "num_preemptions"),
        ({"num_speculative_tokens": 3}, "num_accepted_tokens"),
        ({"max_loras": 2, "max_lora_rank": 4}, "num_hit_tokens"),
    ],
    ids=["recorded", "chunks", "preemption", "speculation", "adapters"],
)
@pytest.mark.parametrize("roles", [False, True], ids=["", "roles"])
def test_results_and_cache_are_bitwise_the_same(
    roles: bool, limits: dict[str, Any], happened: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if roles:
        monkeypatch.setattr(DecoderLayer, "__call__", softened)
        monkeypatch.setattr(engine_module, "roles_differ", lambda device, exact: True)
    adapters = [tmp_path / "a", tmp_path / "b"] if "max_loras" in limits else []
    for seed, folder in enumerate(adapters):
        write_adapter(folder, CONFIG, seed=seed, modules=("q_proj", "o_proj", "up_proj"))
    found = serve(make_engine(**limits), adapters)
    with monkeypatch.context() as patch:
        patch.setattr(ModelConfig, "num_storing_layers", property(lambda config: config.num_layers))
        engine = make_engine(**limits)
    assert not engine.worker.runner.inputs.drops_rows
    assert found == serve(engine, adapters)
    assert getattr(engine.stats(), happened) > 0


def test_other_families_have_no_such_layers() -> None:
    assert CONFIG.num_storing_layers == 2
    assert mixed_decoder.CONFIG.num_storing_layers == mixed_decoder.CONFIG.num_layers
    assert replace(CONFIG, kv_layers=(0, 1, 0, 3)).num_storing_layers == 4


class PaddedLastRowsToy(LastRowsToy, PaddedToy):
    """Takes padded steps whose last layers have room for the wanted rows alone."""


def test_captured_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only steps that want more rows than there may be sequences run operator by operator."""
    use_fakes(monkeypatch)
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 40}
    engines = [toy_engine(**limits), use_graphs(toy_engine(model=PaddedLastRowsToy(), **limits))]
    results = []
    for engine in engines:
        ids = [engine.add_request(prompt, replace(PARAMS, seed=i)) for i, prompt in enumerate(PROMPTS)]
        last = drain(engine)
        outputs = [last[request_id].outputs for request_id in ids]
        num_eager_steps = engine.stats().num_eager_steps
        ids = [engine.add_request(PROMPTS[3], replace(PARAMS, prompt_logprobs=2, max_tokens=2))]
        ids.append(engine.add_embedding_request(PROMPTS[4], pooling="last"))
        last = drain(engine)
        results.append((outputs, last[ids[0]].prompt_logprobs, last[ids[0]].outputs, last[ids[1]].embedding))
    assert results[0] == results[1]
    assert num_eager_steps == 0
    assert 0 < engine.stats().num_eager_steps < engine.stats().num_steps
