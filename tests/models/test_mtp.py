"""Layers for multi-token prediction inside checkpoints: their drafts are those of a reference, and change no text."""

import functools
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.drafts import GREEDY, OPTIONS, check_adapter_and_sleep, recorded_drafts, texts
from support.mtp_models import MTPModel
from support.peft_adapter import write_adapter
from support.tiny_folder import write_tiny_folder
from support.toy import always_speculate
from torch import Tensor

from fastinfer import LLM
from fastinfer.cli.memory_bounds import Rates
from fastinfer.cli.memory_description import describe
from fastinfer.engine.replica_share import ReplicaShare
from fastinfer.errors import RequestError, UnsupportedModelError
from fastinfer.models import load_weights, open_checkpoint, open_mtp_checkpoint
from fastinfer.models.offload import tensors_of
from fastinfer.sampling_params import SamplingParams
from fastinfer.structured_output import StructuredOutputsParams
from fastinfer.utils.sealed_memory import SealedMemory

# At such a temperature the head's distributions and the model's are alike, so that a third of the drafts are accepted.
SAMPLED = replace(GREEDY, temperature=5.0, n=3, seed=4)

make = functools.cache(MTPModel)


def with_mtp(path: Path, **options: Any) -> LLM:
    llm = LLM(str(path), draft_model="mtp", num_speculative_tokens=3, **OPTIONS | options)
    always_speculate(llm.engine)
    return llm


def check(drafts: list[Any], model: MTPModel) -> None:
    """Compare some drafts of each depth."""
    by_depth = [[draft for draft in drafts if draft[1] == depth] for depth in range(3)]
    assert all(by_depth)
    for tokens, num_drafts, logits in (draft for depth in by_depth for draft in depth[:: len(depth) // 3]):
        torch.testing.assert_close(logits, model.drafted_logits(tokens, num_drafts), atol=1e-4, rtol=1e-4)


def check_file(path: Path, model: MTPModel, params: SamplingParams) -> None:
    """Compare drafts with the reference's, and texts with those without drafts."""
    llm = with_mtp(path)
    drafts = recorded_drafts(llm)
    assert texts(llm, params) == texts(LLM(str(path), **OPTIONS), params)
    check(drafts, model)


@pytest.mark.parametrize(
    ("family", "num_mtp"),
    [
        ("deepseek-v3", 1),
        ("deepseek-v3", 3),
        ("glm4-moe", 2),  # the last layer makes the third draft from its own output
        ("glm4-moe-lite", 1),
        ("qwen3-next-plain", 1),
        ("qwen3.5", 1),
        ("qwen3.5-moe", 1),
    ],
)
def test_drafts_are_those_of_the_reference(family: str, num_mtp: int, tmp_path: Path) -> None:
    model = make(family, num_mtp)
    check_file(model.write(tmp_path / "model"), model, GREEDY)


@pytest.mark.parametrize(
    ("family", "num_mtp"), [("deepseek-v3-mscale", 2), ("glm4-moe", 1), ("qwen3.5", 1), ("qwen3.5-moe", 1)]
)
def test_gguf_files(family: str, num_mtp: int, tmp_path: Path) -> None:
    model = make(family, num_mtp)
    check_file(model.write_gguf(tmp_path / "model.gguf"), model, SAMPLED)


@pytest.mark.parametrize(
    ("family", "num_mtp", "kv_cache_memory"),
    [("deepseek-v3", 1, 200_000), ("deepseek-v3", 3, 300_000), ("qwen3.5", 1, 2_500_000)],
)
def test_prefixes_forks_and_preemptions(family: str, num_mtp: int, kv_cache_memory: int, tmp_path: Path) -> None:
    """The states of linear attention after rejected drafts are those of before, too."""
    model = make(family, num_mtp)
    path = model.write(tmp_path / "model")
    llm = with_mtp(path, kv_cache_memory=kv_cache_memory)
    texts(llm, GREEDY)
    drafts = recorded_drafts(llm)
    assert texts(llm, SAMPLED) == texts(LLM(str(path), **OPTIONS), SAMPLED)
    stats = llm.engine.stats()
    assert stats.num_hit_tokens > 40
    assert stats.num_preemptions > 0
    assert 50 < stats.num_accepted_tokens < stats.num_drafted_tokens - 50
    check(drafts, model)


def test_grammars_rounding_and_sleep(tmp_path: Path) -> None:
    path = make("qwen3.5").write(tmp_path / "model")
    params = replace(GREEDY, structured_outputs=StructuredOutputsParams(regex="[^a]{30,}"))
    alone = LLM(str(path), **OPTIONS | {"dtype": "auto"})
    llm = with_mtp(path, dtype="auto")
    for settings in (params, SAMPLED):
        assert texts(llm, settings) == texts(alone, settings)
    llm.sleep(2)
    llm.wake_up()
    assert texts(llm, SAMPLED) == texts(alone, SAMPLED)
    assert llm.engine.stats().num_failed_draws == 0


def test_adapters(tmp_path: Path) -> None:
    """The layer reads the hidden states of the adapted model, and has no adapter itself."""
    path, adapter = make("glm4-moe").write(tmp_path / "model"), tmp_path / "adapter"
    write_adapter(adapter, open_checkpoint(path).config, modules=("q_proj", "o_proj"))
    llm = with_mtp(path, max_loras=1)
    check_adapter_and_sleep(llm, LLM(str(path), max_loras=1, **OPTIONS), adapter)
    assert llm.engine.stats().num_drafted_tokens > 20


def test_replicas_share_the_layer(tmp_path: Path) -> None:
    path = make("glm4-moe").write(tmp_path / "model")
    memories = [SealedMemory.create() for _ in range(2)]
    share = ReplicaShare(2, 2**31, tuple(memory.descriptor for memory in memories))
    replicas = [with_mtp(path, share=share) for _ in range(2)]
    expected = texts(LLM(str(path), **OPTIONS), SAMPLED)
    assert [texts(llm, SAMPLED) for llm in replicas] == [expected, expected]
    assert all(memory.is_sealed for memory in memories)


def test_experts_of_the_layer_may_be_stored_in_another_way(tmp_path: Path) -> None:
    """Those of this layer are one tensor, those of the others single ones."""
    model = make("qwen3.5-moe")
    path = model.write(tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    experts = "mtp.layers.0.mlp.experts"

    def joined(name: str) -> Tensor:
        return torch.stack([tensors.pop(f"{experts}.{index}.{name}.weight") for index in range(8)])

    tensors[f"{experts}.gate_up_proj"] = torch.cat([joined("gate_proj"), joined("up_proj")], 1)
    tensors[f"{experts}.down_proj"] = joined("down_proj")
    save_file(tensors, path / "model.safetensors")
    llm = with_mtp(path)
    drafts = recorded_drafts(llm)
    texts(llm, GREEDY)
    check(drafts, model)


@pytest.mark.parametrize("family", ["glm4-moe", "qwen3.5"])
@pytest.mark.parametrize("is_gguf", [False, True])
def test_memory_is_counted_for_what_is_loaded(family: str, is_gguf: bool, tmp_path: Path) -> None:
    model = make(family)
    path = model.write_gguf(tmp_path / "model.gguf") if is_gguf else model.write(tmp_path / "model")
    parts = open_checkpoint(path).part_bytes("cpu")
    assert {part.layer for part in parts} == {None, *range(4)}
    [only] = {part.layer for part in open_mtp_checkpoint(path).part_bytes("cpu")} - {None}
    assert only == 0
    layers = Counter[int | None]()
    for part, count in parts.items():
        layers[part.layer] += count
    described = describe(str(path), 64, 1, Rates(1e9, 1e9, 1e9), draft_model="mtp")["draft"]
    loaded = sum(tensor.nbytes for tensor in tensors_of(load_weights(open_mtp_checkpoint(path), "auto", "cpu", 64)))
    assert described["weights_bytes"] == loaded
    # The layer has another product, and no vocabulary of its own.
    hidden = model.whole.config.hidden_size
    assert open_mtp_checkpoint(path).weight_bytes("cpu") < layers[3] + 10 * hidden * hidden < layers[3] + layers[None]


@pytest.mark.parametrize("is_gguf", [False, True])
def test_layers_that_never_draft_are_not_read(is_gguf: bool, tmp_path: Path) -> None:
    model = make("deepseek-v3", 3)
    path = model.write_gguf(tmp_path / "model.gguf") if is_gguf else model.write(tmp_path / "model")
    sizes = [open_mtp_checkpoint(path, max_layers=count).weight_bytes("cpu") for count in (1, 2, 3)]
    assert sizes == [sizes[0], 2 * sizes[0], 3 * sizes[0]]
    assert open_mtp_checkpoint(path).config == open_mtp_checkpoint(path, max_layers=5).config
    llm = LLM(str(path), draft_model="mtp", num_speculative_tokens=2, **OPTIONS)
    assert llm.engine.draft_worker is not None
    assert len(llm.engine.draft_worker.kv_cache.layers) == 2


def test_models_without_such_a_layer(tmp_path: Path) -> None:
    llama = write_tiny_folder(tmp_path / "llama")
    with pytest.raises(UnsupportedModelError, match="not implemented for LlamaForCausalLM; supported are Deepseek"):
        with_mtp(llama)
    glm = write_tiny_folder(tmp_path / "glm", "glm4-moe")
    with pytest.raises(RequestError, match="needs a layer for multi-token prediction, got none"):
        with_mtp(glm)
