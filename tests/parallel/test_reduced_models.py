"""Models whose ranks add parts of sums: close to one rank, the same on all ranks, and the same in every batch."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.divided_models import (
    CONFIG,
    FORMS,
    GGUF_FORMS,
    KINDS,
    MIXED,
    TEXTS,
    config_of,
    model_in,
    weight_bytes,
)
from support.families import make_model, save_model
from support.gguf_model_file import write_gguf
from support.random_checkpoint import RandomCheckpoint, int4
from support.ranks import in_ranks, logits_of_texts
from torch import Tensor

from fastinfer.errors import RequestError, UnsupportedModelError
from fastinfer.models import load_weights, open_checkpoint
from fastinfer.models.checkpoint import Checkpoint
from fastinfer.models.state_config import Mamba2Config
from fastinfer.parallel.group import Group
from fastinfer.parallel.loader import load_shard
from fastinfer.parallel.support import check_divisible

# With a fused norm after each sum, norms behind outputs, LayerNorms and biases, one norm for attention and MLP, experts
# alone, with a norm behind them and beside others, values smaller than keys, each kind of state, latent attention, and
# inputs of a layer's own.
FAMILIES = [
    "llama3",
    "llama-biases",
    "gemma3",
    "gpt2",
    "cohere2",
    "mixtral",
    "qwen2-moe",
    "gpt-oss",
    "flex-olmo",
    "afmoe",
    "mimo-v2-flash",
    "llama4",
    "granite-moe-shared",
    "qwen3-next",
    "olmo-hybrid",
    "lfm2-biases",
    "nemotron-h-dense",
    "falcon-h1",
    "deepseek-v3",
    "minicpm3",
    "axk1",
    "gemma4-inputs",
    "gemma4-moe",
    "phimoe",
    "apertus",
    "nemotron-h-latent",
    "glm-dsa",
    "step3.7",
    "laguna",
    "kolibri",
    "kimi-linear",
    "bailing-hybrid",
]


def check_close(open_model: Callable[[], Checkpoint], size: int, dtype: str, most: float) -> None:
    """Hidden states and logits differ from those of one rank by at most this, relative to the largest."""
    expected = logits_of_texts(load_weights(open_model(), dtype, "cpu", None), TEXTS)

    def run(group: Group) -> tuple[tuple[Tensor, Tensor], list[tuple[Tensor, Tensor]]]:
        model = load_shard(open_model(), dtype, None, group, layout="reduce")
        return logits_of_texts(model, TEXTS), [logits_of_texts(model, [text]) for text in TEXTS]

    first, *others = in_ranks(size, run)
    for together, alone in others:
        assert all(map(torch.equal, together, first[0]))
        assert all(
            torch.equal(*pair) for parts in zip(alone, first[1], strict=True) for pair in zip(*parts, strict=True)
        )
    for got, want, parts in zip(first[0], expected, zip(*first[1], strict=True), strict=True):
        assert torch.equal(torch.cat(parts), got)
        assert (got - want).abs().amax() <= most * want.abs().amax()


@pytest.mark.parametrize(("family", "size"), [(family, 2 + index % 2) for index, family in enumerate(FAMILIES)])
def test_families(family: str, size: int, tmp_path: Path) -> None:
    save_model(tmp_path, family)
    check_close(lambda: open_checkpoint(tmp_path, True), size, "float32", 1e-5)


@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 0.02), ("float16", 0.003)])
def test_dtypes(dtype: str, most: float, tmp_path: Path) -> None:
    save_model(tmp_path, "llama3")  # without experts, of which rounding may choose others
    check_close(lambda: open_checkpoint(tmp_path), 2, dtype, most)


@pytest.mark.parametrize("form", sorted(FORMS.keys() - GGUF_FORMS.keys() - {"int8 permuted"}))
def test_forms_of_weights(form: str) -> None:
    checkpoint = model_in(form, CONFIG)
    # Each rank rounds its inputs to 8 bits by the largest that it has, where one rank does so by the largest of all.
    check_close(lambda: checkpoint, 3, "float32", 0.05 if form == "w8a8" else 1e-5)


@pytest.mark.parametrize("form", ["int4", "int8", "Q4_K", "Q6_K"])
def test_rounded_inputs(form: str) -> None:
    """With inputs of 8 bits ranks are no farther from fp32 than one rank is: the rounding differs, but is no coarser.

    Without experts, of which rounding may choose others.
    """
    config = replace(MIXED, num_experts=0, experts_per_token=0, dense_layers=frozenset())
    checkpoint = model_in(form, config)
    exact, one = (logits_of_texts(load_weights(checkpoint, dtype, "cpu", None), TEXTS) for dtype in ("float32", "auto"))

    def run(group: Group) -> tuple[Tensor, Tensor]:
        return logits_of_texts(load_shard(checkpoint, "auto", None, group, layout="reduce"), TEXTS)

    for divided, whole, expected in zip(in_ranks(3, run)[0], one, exact, strict=True):
        assert (divided - expected).norm() <= 1.3 * (whole - expected).norm()


def test_permuted_inputs_are_refused() -> None:
    checkpoint = RandomCheckpoint(CONFIG, lambda _, values: FORMS["int8 permuted"](values))
    message = "layers.0.o_proj: tensor_parallel_layout must be gather for this model, got reduce: .*permuted"
    with pytest.raises(UnsupportedModelError, match=message):
        load_shard(checkpoint, "auto", None, Group.create(2), layout="reduce")


def test_more_ranks_than_experts_are_refused(tmp_path: Path) -> None:
    save_model(tmp_path, "mixtral")
    checkpoint = open_checkpoint(tmp_path)
    check_divisible(checkpoint, checkpoint.config.num_experts, "reduce")
    with pytest.raises(RequestError, match=f"must be at most {checkpoint.config.num_experts} for this model"):
        check_divisible(checkpoint, checkpoint.config.num_experts + 1, "reduce")


@pytest.mark.parametrize("kind", KINDS)
def test_each_rank_has_its_part_of_the_weights(kind: str) -> None:
    checkpoint = RandomCheckpoint(config_of(kind), lambda _, values: int4(values))
    whole = weight_bytes(load_weights(checkpoint, "auto", "cpu", None))
    for size, most in [(2, 0.6), (3, 0.4)]:  # two ranks have three and six heads of nine
        parts = in_ranks(size, lambda group: weight_bytes(load_shard(checkpoint, "auto", None, group, layout="reduce")))
        assert max(parts) <= most * whole
        assert sum(parts) <= 1.1 * whole  # projections to latents are on all ranks


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_exchanges_are_those_of_the_formula(kind: str, size: int) -> None:
    config = config_of(kind)
    checkpoint = RandomCheckpoint(config, lambda _, values: int4(values))

    def run(group: Group) -> tuple[int, int]:
        logits_of_texts(load_shard(checkpoint, "auto", None, group, layout="reduce"), TEXTS)
        return group.exchanged

    results = in_ranks(size, run)
    hidden = config.hidden_size
    gathered, num_sums = [hidden, config.vocab_size], 0  # embedding and logits
    for layer in range(config.num_layers):
        states = config.states if config.has_state(layer) else None
        if isinstance(states, Mamba2Config) and states.num_groups < size:
            gathered += [states.inner_size + states.conv_dim, hidden]  # projections, and the output
            num_sums += 1
        else:
            num_sums += 2
        if config.qk_norm == "all":
            gathered += [config.q_size(layer), config.kv_size(layer)]
    assert {exchanges for exchanges, _ in results} == {len(gathered) + num_sums}
    # Each rank sends its columns of what is gathered, and all of what is added.
    tokens = sum(map(len, TEXTS))
    assert sum(num_bytes for _, num_bytes in results) == 4 * tokens * (sum(gathered) + num_sums * size * hidden)


def test_gguf_file_with_value_heads_in_another_order(tmp_path: Path) -> None:
    write_gguf(path := tmp_path / "model.gguf", make_model("qwen3.5", num_hidden_layers=4))
    check_close(lambda: open_checkpoint(path, True), 3, "float32", 1e-5)


def test_gguf_file(model_path: Path) -> None:
    check_close(lambda: open_checkpoint(model_path, True), 2, "float32", 1e-4)
