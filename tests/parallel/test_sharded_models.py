"""Models that are divided among ranks compute bit for bit what one rank computes, and each rank has its part alone."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.families import save_model
from support.random_checkpoint import RandomCheckpoint, int4, int8
from support.ranks import in_ranks, logits_of_texts
from torch import Tensor

from fastinfer import ops
from fastinfer.errors import UnsupportedModelError
from fastinfer.formats.unpacked import Dense, Int8, Lut, Unpacked
from fastinfer.models import Model, load_weights, open_checkpoint
from fastinfer.models.config import ModelConfig, Precision
from fastinfer.models.offload import tensors_of
from fastinfer.parallel.group import SLOT_BYTES, Group
from fastinfer.parallel.loader import load_shard
from fastinfer.parallel.support import check_divisible

CONFIG = ModelConfig(
    architecture="toy",
    hidden_size=192,
    intermediate_size=384,
    num_layers=2,
    num_heads=9,
    num_kv_heads=3,
    head_dim=32,
    rotary_dim=32,
    vocab_size=320,
    max_position=128,
    norm_eps=1e-5,
)
TEXTS = [[3, 1, 4, 1, 5, 9, 2, 6] * 9, [300], [271, 82, 81]]
UNDIVIDED = {
    "olmo2": "a norm of all heads together",
    "minimax-m2": "a norm of all heads together",
    "deepseek-v2": "latent attention",
    "qwen3-next": "layers with states",
    "lfm2": "layers with states",
    "granite-hybrid": "layers with states",
}
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
    "exaone4",
    "cohere2",
    "qwen2-moe",
    "gpt-oss",
    "glm4-moe",
    "granite-moe-shared",
]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("family", DIVIDED)
def test_results_are_bitwise_those_of_one_rank(family: str, size: int, tmp_path: Path) -> None:
    check_same(family, size, "auto", tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtypes(dtype: str, tmp_path: Path) -> None:
    check_same("llama-biases", 3, dtype, tmp_path)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(6, 1, 2), (6, 1, 3), (9, 3, 2), (8, 2, 3), (4, 4, 4)])
def test_numbers_of_heads(heads: int, kv_heads: int, size: int, tmp_path: Path) -> None:
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 16}
    check_same("qwen3", size, "auto", tmp_path, **sizes)


def check_same(family: str, size: int, dtype: str, folder: Path, **sizes: int) -> None:
    save_model(folder, family, **({"sizes": sizes} if sizes else {}))
    expected = logits_of_texts(load_weights(open_checkpoint(folder), dtype, "cpu", None), TEXTS)

    def run(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        exact = Precision.of(dtype).exact
        return logits_of_texts(load_shard(open_checkpoint(folder, exact), dtype, None, group), TEXTS)

    for results in in_ranks(size, run):
        for got, want in zip(results, expected, strict=True):
            assert torch.equal(got, want)


def weight_bytes(model: Model) -> int:
    """Bytes of all packed matrices."""
    packed = (tensor for tensor in tensors_of(model) if tensor.dtype in (torch.uint8, torch.float16))
    return sum(tensor.nbytes for tensor in packed if tensor.dim() > 1)


@pytest.mark.parametrize("family", UNDIVIDED)
def test_other_models_are_refused(family: str, tmp_path: Path) -> None:
    save_model(tmp_path, family)
    with pytest.raises(UnsupportedModelError, match=UNDIVIDED[family]):
        check_divisible(open_checkpoint(tmp_path), 2)


FORMS: dict[str, Callable[[Tensor], Unpacked]] = {
    "dense": lambda values: Dense(values.bfloat16()),
    "int4": int4,
    "int8": int8,
    "int8 permuted": lambda values: replace(int8(values), permutation=torch.arange(values.shape[1]).flip(0)),
    "w8a8": lambda values: Int8(
        (values / values.abs().amax(1, keepdim=True) * 127).round().to(torch.int8),
        values.abs().amax(1, keepdim=True) / 127,
        int8_activations=True,
    ),
    "lut": lambda values: Lut(int4(values).q, int4(values).scales, table=torch.arange(-8.0, 8.0)),
}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("form", FORMS)
def test_forms_of_weights(form: str, size: int) -> None:
    checkpoint = RandomCheckpoint(
        CONFIG, lambda name, values: int8(values) if "embedding" in name else FORMS[form](values)
    )
    expected = logits_of_texts(load_weights(checkpoint, "auto", "cpu", None), TEXTS)
    for results in in_ranks(size, lambda group: logits_of_texts(load_shard(checkpoint, "auto", None, group), TEXTS)):
        for got, want in zip(results, expected, strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("tied", [True, False])
def test_each_rank_has_its_part_of_the_weights(tied: bool) -> None:
    checkpoint = RandomCheckpoint(CONFIG, lambda _, values: int4(values), tied=tied)
    whole = weight_bytes(load_weights(checkpoint, "auto", "cpu", None))
    for size, most in [(2, 0.55), (3, 0.4)]:
        parts = in_ranks(size, lambda group: weight_bytes(load_shard(checkpoint, "auto", None, group)))
        assert max(parts) <= most * whole
        assert sum(parts) <= 1.05 * whole


def test_rows_of_dense_weights_do_not_keep_the_others() -> None:
    checkpoint = RandomCheckpoint(CONFIG)

    def storages(model: Model) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors_of(model) if tensor.shape[1:] > (32,))

    whole = storages(load_weights(checkpoint, "auto", "cpu", None))
    assert max(in_ranks(2, lambda group: storages(load_shard(checkpoint, "auto", None, group)))) <= 0.55 * whole


@pytest.mark.parametrize("size", [1, 2, 3])
def test_exchanges_are_those_of_the_formula(size: int) -> None:
    checkpoint = RandomCheckpoint(CONFIG, lambda _, values: int4(values))

    def run(group: Group) -> tuple[int, int]:
        logits_of_texts(load_shard(checkpoint, "auto", None, group), TEXTS)
        return group.exchanged

    counts = in_ranks(size, run)
    tokens, hidden, attended = sum(map(len, TEXTS)), CONFIG.hidden_size, CONFIG.num_heads * CONFIG.head_dim
    # Embedding, logits, and of each layer the inputs and outputs of its two output projections.
    columns = hidden + CONFIG.vocab_size + CONFIG.num_layers * (attended + hidden + CONFIG.intermediate_size + hidden)
    assert {exchanges for exchanges, _ in counts} == {2 + 4 * CONFIG.num_layers}
    assert sum(num_bytes for _, num_bytes in counts) == 4 * tokens * columns


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
