"""Division of layers into stages."""

import itertools
import random
from dataclasses import replace
from pathlib import Path

import pytest
from support.families import save_model

from fastinfer.errors import RequestError
from fastinfer.models import load_weights, open_checkpoint
from fastinfer.models.config import ModelConfig
from fastinfer.models.offload import tensors_of
from fastinfer.parallel.layer_split import layer_cost, split_layers, stage_starts, stages_of

SMOLLM2 = ModelConfig(
    architecture="llama",
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rotary_dim=64,
    vocab_size=49152,
    max_position=8192,
    norm_eps=1e-5,
)


def lengths(config: ModelConfig, num_stages: int) -> list[int]:
    costs = [layer_cost(config, layer) for layer in range(config.num_layers)]
    stages = split_layers(costs, config.vocab_size * config.hidden_size, num_stages, stage_starts(config))
    assert [layer for stage in stages for layer in stage] == list(range(config.num_layers))
    return [len(stage) for stage in stages]


def test_the_output_layer_counts() -> None:
    assert lengths(SMOLLM2, 2) == [19, 11]
    assert lengths(SMOLLM2, 3) == [13, 13, 4]
    assert lengths(replace(SMOLLM2, vocab_size=1000), 2) == [15, 15]


def test_each_stage_gets_a_layer() -> None:
    assert lengths(replace(SMOLLM2, num_layers=3), 3) == [1, 1, 1]


def test_layers_of_different_cost() -> None:
    experts = replace(SMOLLM2, num_layers=8, num_experts=16, experts_per_token=4, intermediate_size=256)
    dense = replace(experts, dense_layers=frozenset({0, 1}), dense_intermediate_size=4096)
    assert layer_cost(dense, 0) > 2 * layer_cost(dense, 2)
    assert lengths(replace(dense, vocab_size=1), 2) == [2, 6]


def test_no_division_is_better() -> None:
    random.seed(0)
    for _ in range(50):
        costs = [random.randint(1, 20) for _ in range(random.randint(3, 8))]
        starts = [0, *sorted(random.sample(range(1, len(costs)), random.randint(2, len(costs) - 1)))]
        head, num_stages = random.randint(0, 40), random.randint(1, 3)

        def worst(ends: tuple[int, ...], costs: list[int] = costs, head: int = head) -> int:
            sums = [sum(costs[start:end]) for start, end in itertools.pairwise((0, *ends, len(costs)))]
            return max(*sums[:-1], sums[-1] + head, 0)

        stages = split_layers(costs, head, num_stages, starts)
        all_ends = itertools.combinations(starts[1:], num_stages - 1)
        assert {stage.start for stage in stages} <= set(starts)
        assert worst(tuple(stage.stop for stage in stages[:-1])) == min(map(worst, all_ends))


@pytest.mark.parametrize(
    "family", ["llama3", "mixtral", "deepseek-v2", "glm-dsa", "qwen3.5", "lfm2", "granite-hybrid-dense"]
)
def test_costs_are_those_of_the_weights(family: str, tmp_path: Path) -> None:
    save_model(tmp_path, family)
    checkpoint = open_checkpoint(tmp_path, exact=True)
    config = checkpoint.config
    model = load_weights(checkpoint, "float32", "cpu", None)
    for index, layer in enumerate(model.layers):  # type: ignore[attr-defined]
        counts = [t.numel() for t in tensors_of(layer) if t.dim() > 1 and t.shape[0] != config.max_position]
        cost = layer_cost(config, index)
        if config.has_experts(index):  # all of which have weights
            per_expert = 3 * config.hidden_size * config.intermediate_size
            cost += (config.num_experts - config.experts_per_token) * per_expert
        assert cost == pytest.approx(sum(counts), rel=0.02)


def test_more_stages_than_layers_are_refused(tmp_path: Path) -> None:
    save_model(tmp_path, "llama3")
    with pytest.raises(RequestError, match=r"pipeline_parallel_size must be at most 4, the most stages .* got 5"):
        stages_of(open_checkpoint(tmp_path), 5)


def test_stages_of_chosen_layers(tmp_path: Path) -> None:
    save_model(tmp_path, "falcon-h1")  # has attention beside Mamba-2: two layers share an input
    checkpoint = open_checkpoint(tmp_path)
    assert stages_of(checkpoint, 2, [4, 2]) == [range(4), range(4, 6)]
    assert stages_of(checkpoint, 1, [6]) == [range(6)]
    with pytest.raises(RequestError, match=r"must keep layer 3 in the stage of the layer before it, .*got \[3, 3\]"):
        stages_of(checkpoint, 2, [3, 3])


def test_layers_that_share_something_stay_together(tmp_path: Path) -> None:
    """Falcon-H1 has attention beside Mamba-2; the last layers of the other have no keys and values of their own."""
    save_model(tmp_path / "falcon", "falcon-h1")
    assert stage_starts(open_checkpoint(tmp_path / "falcon").config) == [0, 2, 4]
    assert stage_starts(replace(SMOLLM2, num_layers=6, kv_layers=(0, 1, 2, 3, 2, 3))) == [0, 1, 2]
