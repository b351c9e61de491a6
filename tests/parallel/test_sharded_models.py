"""Models that are divided among ranks compute bit for bit what one rank computes, and each rank has its part alone."""

from pathlib import Path

import pytest
import torch
from support.divided_models import CONFIG, FORMS, KINDS, TEXTS, config_of, model_in, weight_bytes
from support.families import make_model, save_model
from support.gguf_model_file import write_gguf
from support.random_checkpoint import RandomCheckpoint, int4
from support.ranks import in_ranks, logits_of_texts
from torch import Tensor

from fastinfer import ops
from fastinfer.errors import RequestError
from fastinfer.models import Model, load_weights, open_checkpoint
from fastinfer.models.config import Precision
from fastinfer.models.offload import tensors_of
from fastinfer.models.state_config import Mamba2Config
from fastinfer.parallel.group import SLOT_BYTES, Group
from fastinfer.parallel.loader import load_shard
from fastinfer.parallel.support import check_divisible

DIVIDED = [
    "llama2",
    "llama3",
    "llama-biases",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "phi3",
    "gpt2",
    "mixtral",
    "phimoe",
    "exaone4",
    "cohere2",
    "qwen2-moe",
    "gpt-oss",
    "glm4-moe",
    "afmoe",
    "mimo-v2-flash-other",
    "llama4",
    "granite-moe-shared",
    "qwen3-next",
    "qwen3.5-few",
    "lfm2-biases",
    "lfm3",
    "granite-hybrid",
    "granite-hybrid-dense",
    "apertus",
    "nemotron-h-latent",
    "nemotron-h-dense",
    "falcon-h1",
    "deepseek-v2",
    "deepseek-v3",
    "glm-dsa",
    "axk1",
    "gemma4",
    "gemma4-inputs",
    "gemma4-moe",
    "hunyuan-moe",
    "nanochat",
    "phi",
    "gpt-neox",
    "olmo",
    "cohere2-moe",
    "step3.7",
    "laguna",
    "laguna-elements",
    "kolibri",
    "kimi-linear",
    "kimi-linear-groups",
    "bailing-hybrid",
]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("family", DIVIDED)
def test_results_are_bitwise_those_of_one_rank(family: str, size: int, tmp_path: Path) -> None:
    check_same(family, size, "auto", tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama-biases", "qwen3.5", "granite-hybrid-dense", "deepseek-v2"])
def test_dtypes(family: str, dtype: str, tmp_path: Path) -> None:
    check_same(family, 3, dtype, tmp_path)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(6, 1, 2), (6, 1, 3), (9, 3, 2), (8, 2, 3), (4, 4, 4)])
def test_numbers_of_heads(heads: int, kv_heads: int, size: int, tmp_path: Path) -> None:
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 16}
    check_same("qwen3", size, "auto", tmp_path, **sizes)


def check_same(family: str, size: int, dtype: str, folder: Path, **sizes: int) -> None:
    save_model(folder, family, **({"sizes": sizes} if sizes else {}))
    check_same_logits(folder, size, dtype)


def check_same_logits(path: Path, size: int, dtype: str) -> None:
    exact = Precision.of(dtype).exact
    expected = logits_of_texts(load_weights(open_checkpoint(path, exact), dtype, "cpu", None), TEXTS)

    def run(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        return logits_of_texts(load_shard(open_checkpoint(path, exact), dtype, None, group), TEXTS)

    for results in in_ranks(size, run):
        for got, want in zip(results, expected, strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("family", ["olmo2", "minimax-m2", "olmo-hybrid"])
def test_norm_of_all_heads(family: str, tmp_path: Path) -> None:
    check_same(family, 2, "auto", tmp_path)
    with pytest.raises(RequestError, match="tensor_parallel_size must be at most 2 for this model"):
        check_divisible(open_checkpoint(tmp_path), 3)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("form", FORMS)
def test_forms_of_weights(form: str, size: int) -> None:
    checkpoint = model_in(form)
    expected = logits_of_texts(load_weights(checkpoint, "auto", "cpu", None), TEXTS)
    for results in in_ranks(size, lambda group: logits_of_texts(load_shard(checkpoint, "auto", None, group), TEXTS)):
        for got, want in zip(results, expected, strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_each_rank_has_its_part_of_the_weights(kind: str, tied: bool) -> None:
    checkpoint = RandomCheckpoint(config_of(kind), lambda _, values: int4(values), tied=tied)
    whole = weight_bytes(load_weights(checkpoint, "auto", "cpu", None))
    for size, most in [(2, 0.55), (3, 0.4)]:
        parts = in_ranks(size, lambda group: weight_bytes(load_shard(checkpoint, "auto", None, group)))
        assert max(parts) <= most * whole
        assert sum(parts) <= 1.1 * whole  # projections to latents are on all ranks


def test_rows_of_dense_weights_do_not_keep_the_others() -> None:
    checkpoint = RandomCheckpoint(CONFIG)

    def storages(model: Model) -> int:
        """Count the bytes of all storages; of a tensor in huge pages, which is a copy, its own."""
        return sum(
            tensor.untyped_storage().nbytes() if tensor.untyped_storage().resizable() else tensor.nbytes
            for tensor in tensors_of(model)
            if tensor.shape[1:] > (32,)
        )

    whole = storages(load_weights(checkpoint, "auto", "cpu", None))
    assert max(in_ranks(2, lambda group: storages(load_shard(checkpoint, "auto", None, group)))) <= 0.55 * whole


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_exchanges_are_those_of_the_formula(kind: str, size: int) -> None:
    config = config_of(kind)
    checkpoint = RandomCheckpoint(config, lambda _, values: int4(values))
    expected = logits_of_texts(load_weights(checkpoint, "auto", "cpu", None), TEXTS)

    def run(group: Group) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        return logits_of_texts(load_shard(checkpoint, "auto", None, group), TEXTS), group.exchanged

    results = in_ranks(size, run)
    tokens, hidden = sum(map(len, TEXTS)), config.hidden_size
    per_token = config.experts_per_token if config.num_experts else 1
    widths = [hidden, config.vocab_size]  # embedding and logits
    for layer in range(config.num_layers):
        states = config.states if config.has_state(layer) else None
        if isinstance(states, Mamba2Config) and states.num_groups < size:
            widths += [states.inner_size + states.conv_dim]
        else:
            widths += [config.attention_size(layer)]
        widths += [hidden, per_token * config.intermediate_size, per_token * hidden]
        if config.shared_intermediate_size:
            widths += [config.shared_intermediate_size, hidden]
        if config.qk_norm == "all":
            widths += [config.q_size(layer), config.kv_size(layer)]
    assert {exchanges for _, (exchanges, _) in results} == {len(widths)}
    assert sum(num_bytes for _, (_, num_bytes) in results) == 4 * tokens * sum(widths)
    for got, _ in results:
        assert all(map(torch.equal, got, expected))


def test_large_activations_are_exchanged_in_parts() -> None:
    tokens, width = 3, SLOT_BYTES // 8 + 16  # of 4 bytes: one row for each exchange

    def run(group: Group) -> tuple[torch.Tensor, int]:
        x = torch.full((tokens, width // 2), float(group.rank)) + torch.arange(tokens)[:, None]
        return ops.all_gather(x, group.memory, group.rank, [width // 2] * 2), group.exchanged[0]

    for out, exchanges in in_ranks(2, run):
        assert exchanges == tokens
        assert torch.equal(out[:, 0], torch.arange(3.0))
        assert torch.equal(out[:, -1], torch.arange(3.0) + 1)


@pytest.mark.parametrize("size", [2, 3])
def test_gguf_file(size: int, model_path: Path) -> None:
    expected = logits_of_texts(whole := load_weights(open_checkpoint(model_path), "auto", "cpu", 128), TEXTS)

    def run(group: Group) -> tuple[tuple[Tensor, Tensor], int]:
        model = load_shard(open_checkpoint(model_path), "auto", 128, group)
        return logits_of_texts(model, TEXTS), weight_bytes(model)

    for results, num_bytes in in_ranks(size, run):
        assert num_bytes <= {2: 0.55, 3: 0.4}[size] * weight_bytes(whole)
        for got, want in zip(results, expected, strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("size", [2, 3])
def test_gguf_file_with_value_heads_in_another_order(size: int, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", make_model("qwen3.5", num_hidden_layers=4))
    assert getattr(open_checkpoint(tmp_path / "model.gguf").config.states, "tiled_output", False)
    check_same_logits(tmp_path / "model.gguf", size, "auto")
