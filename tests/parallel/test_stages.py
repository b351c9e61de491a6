"""Stages of a model, one after the other, compute bit for bit what the whole model computes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.divided_models import FORMS, model_in
from support.families import save_model
from support.random_checkpoint import RandomCheckpoint, int4
from support.ranks import in_ranks, logits_of_texts
from torch import Tensor

from fastinfer.models import load_weights, open_checkpoint
from fastinfer.models.batch import Batch
from fastinfer.models.checkpoint import Checkpoint
from fastinfer.models.config import ModelConfig, Precision
from fastinfer.models.kv_cache import KVCache
from fastinfer.models.offload import tensors_of
from fastinfer.parallel.group import Group
from fastinfer.parallel.layer_split import stage_starts
from fastinfer.parallel.loader import load_shard
from fastinfer.parallel.stage import Stage

# The shape of SmolLM2, with fewer layers and tokens.
CONFIG = ModelConfig(
    architecture="llama",
    hidden_size=576,
    intermediate_size=1536,
    num_layers=5,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rotary_dim=64,
    vocab_size=512,
    max_position=128,
    norm_eps=1e-5,
)
NARROW = replace(CONFIG, hidden_size=192, intermediate_size=256)
CONFIGS = {
    "grouped": CONFIG,
    "multi-query": replace(NARROW, num_kv_heads=1),
    "experts": replace(
        NARROW, num_experts=4, experts_per_token=2, dense_layers=frozenset({0}), dense_intermediate_size=256
    ),
}
TEXTS = [[3, 1, 4, 1, 5, 9, 2, 6] * 9, [300], [271, 82, 81]]
FAMILIES = [
    "gemma2",
    "gemma3",
    "gpt2",
    "olmo2",
    "cohere2",
    "gpt-oss",
    "deepseek-v2",
    "glm-dsa",
    "axk1",
    "glm4-moe",
    "afmoe",
    "mimo-v2-flash",
    "minimax-m2",
    "qwen3-next",
    "olmo-hybrid",
    "lfm2",
    "lfm3",
    "granite-hybrid",
    "nemotron-h",
    "falcon-h1",
    "gemma4-inputs",
    "hunyuan",
    "nanochat",
    "phi",
    "cohere2-moe",
    "kimi-linear",
    "bailing-hybrid",
]


def stages_of(checkpoint: Checkpoint, dtype: str, ends: list[int], group: Group | None = None) -> list[Stage]:
    """One rank's part of all stages, each of which has the same team."""
    starts = [0, *ends[:-1]]
    group = group or Group.create(1)
    return [
        load_shard(checkpoint, dtype, None, group, layers=range(start, end))
        for start, end in zip(starts, ends, strict=True)
    ]


def run_stages(stages: list[Stage]) -> tuple[Tensor, Tensor]:
    """Hidden states and logits of all tokens of the texts, as ``logits_of_texts`` returns them."""
    batch, hidden = Batch.of_texts(TEXTS, 16), None
    num_blocks = [sum(-(-len(text) // 16) for text in TEXTS)]
    for stage in stages:
        cache = KVCache.of_model(
            stage.config, num_blocks, 16, torch.float32, "cpu", state_dtype=stage.dtype, layers=stage.indices
        )
        assert len(cache.layers) == len(stage.indices)
        hidden = stage.forward(replace(batch, hidden=hidden), cache)
        rows = torch.arange(len(hidden))
        assert stage.is_last or len(stage.logits(hidden, rows)) == 0
    assert hidden is not None
    return hidden, stages[-1].logits(hidden, rows)


def check_same(checkpoint: Checkpoint, dtype: str, ends: list[int], team_size: int = 1) -> None:
    expected = logits_of_texts(load_weights(checkpoint, dtype, "cpu", None), TEXTS)
    for found in in_ranks(team_size, lambda group: run_stages(stages_of(checkpoint, dtype, ends, group))):
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "auto"])
@pytest.mark.parametrize("name", CONFIGS)
def test_results_are_bitwise_those_of_the_model(name: str, dtype: str) -> None:
    check_same(RandomCheckpoint(CONFIGS[name], lambda _, values: int4(values)), dtype, [3, 5])


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_weights(form: str) -> None:
    """In three stages, and in two whose weights are divided."""
    check_same(model_in(form), "auto", [1, 2, 3])
    check_same(model_in(form), "auto", [2, 3], team_size=2)


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, tmp_path: Path) -> None:
    save_model(tmp_path, family)
    checkpoint = open_checkpoint(tmp_path, Precision.of("auto").exact)
    starts = stage_starts(checkpoint.config)
    check_same(checkpoint, "auto", [*starts[1:3], checkpoint.config.num_layers])


@pytest.mark.parametrize("tied", [True, False])
def test_each_stage_has_its_weights_alone(tied: bool) -> None:
    checkpoint = RandomCheckpoint(CONFIG, lambda _, values: int4(values), tied=tied)

    def num_bytes(part: Any) -> int:
        return sum(tensor.nbytes for tensor in tensors_of(part) if tensor.dtype in (torch.uint8, torch.float16))

    stages = stages_of(checkpoint, "auto", [1, 4, 5])
    [layer] = {num_bytes(layer) for stage in stages for layer in stage.layers}
    vocabulary = num_bytes(stages[0].embedding)
    assert [num_bytes(stage) for stage in stages] == [layer + vocabulary, 3 * layer, layer + vocabulary]


def test_missing_weights_say_where_they_are() -> None:
    first, last = stages_of(RandomCheckpoint(NARROW), "float32", [2, 5])
    with pytest.raises(ValueError, match="the output layer is in the last stage"):
        first.lm_head.linear(torch.zeros(1, 192))
    with pytest.raises(ValueError, match="the embedding is in the first stage"):
        last.embedding.rows(torch.zeros(1, dtype=torch.int64), torch.float32)
