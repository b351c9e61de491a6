"""GGUF files whose tensors fit the model but not each other, or are of a type that few files have there."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from support.random_checkpoint import RandomCheckpoint
from support.tiny_decoder import CONFIG

from fastinfer.errors import CheckpointFormatError, GGUFFormatError, UnsupportedModelError
from fastinfer.formats.gguf import GGUFFile
from fastinfer.models import load_model
from fastinfer.models.config import ModelConfig, Precision
from fastinfer.models.gguf_checkpoint import GGUFCheckpoint
from fastinfer.models.gguf_config import read_gguf_config
from fastinfer.models.loader import load_decoder
from fastinfer.ops import RopeScaling
from fastinfer.weights.pack import make_weight

ROWS, HIDDEN = 37, 96


def write(path: Path, tensors: dict[str, tuple[np.ndarray, Any]], **numbers: int) -> GGUFFile:
    """A file of an architecture and some tensors; keys of its sizes are given without the architecture."""
    writer = gguf.GGUFWriter(path, "llama")
    sizes = {"context_length": 64, "embedding_length": HIDDEN, "block_count": 1, "feed_forward_length": 64}
    for key, value in (sizes | {"attention.head_count": 3} | numbers).items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    for name, (values, kind) in tensors.items():
        writer.add_tensor(name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFFile(path)


def iq4_nl(rows: int, columns: int) -> np.ndarray:
    """Random blocks: a scale of 16 bits, and 32 indices of 4 bits."""
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (rows, columns // 32, 18), np.uint8)
    blocks[..., :2] = random.normal(0, 0.01, (rows, columns // 32, 1)).astype(np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("exact", [True, False])
def test_rows_of_an_embedding_of_iq4_nl(tmp_path: Path, exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is looked up, and multiplied if it is the last product, too; in parts that end inside a tile."""
    kind = gguf.GGMLQuantizationType.IQ4_NL
    data = iq4_nl(ROWS, HIDDEN)
    expected = torch.from_numpy(gguf.quants.dequantize(data, kind))
    checkpoint = GGUFCheckpoint(write(tmp_path / "model.gguf", {"token_embd.weight": (data, kind)}), exact)
    monkeypatch.setattr("fastinfer.models.gguf_checkpoint.PART_ELEMENTS", 16 * HIDDEN)
    parts = checkpoint.parts("embedding", ROWS, HIDDEN)
    weight = make_weight(parts, 32, "cpu", out_features=ROWS)
    ids = torch.tensor([36, 0, 15, 16, 0])
    assert torch.equal(weight.rows(ids, torch.float32), expected[ids])
    x = torch.randn(5, HIDDEN)
    torch.testing.assert_close(weight.linear(x), x @ expected.T)


@pytest.mark.parametrize("counts", [(16, 15), (17, 16), (0, 16), (16, 32)])
def test_factors_of_longrope(tmp_path: Path, counts: tuple[int, int]) -> None:
    names = ("rope_factors_short.weight", "rope_factors_long.weight")
    single = gguf.GGMLQuantizationType.F32
    tensors = {name: (np.ones(count, np.float32), single) for name, count in zip(names, counts, strict=True) if count}
    tensors["token_embd.weight"] = (np.ones((ROWS, HIDDEN), np.float32), single)
    lengths = {"rope.scaling.original_context_length": 32}
    with pytest.raises(GGUFFormatError, match=r"tensor 'rope_factors_\w+.weight' must be 16 F32 numbers, got"):
        read_gguf_config(write(tmp_path / "bad.gguf", tensors, **lengths))
    tensors |= {name: (np.ones(16, np.float32), single) for name in names}
    config = read_gguf_config(write(tmp_path / "model.gguf", tensors, **lengths))
    assert config.rope_scaling.long_factors == (1.0,) * 16


def test_fewer_rows_than_tokens(model_path: Path, tmp_path: Path) -> None:
    file = GGUFFile(model_path)
    file.metadata["tokenizer.ggml.tokens"] = [*file.metadata["tokenizer.ggml.tokens"], "one more"]
    types = file.metadata["tokenizer.ggml.token_type"]
    file.metadata["tokenizer.ggml.token_type"] = np.append(types, types[:1])
    message = r"expected an embedding of at least 49153 rows, as many as the tokenizer has tokens, got 49152"
    with pytest.raises(CheckpointFormatError, match=message):
        load_model(GGUFCheckpoint(file))


def decoder_of(**changes: Any) -> None:
    config = ModelConfig(**{**vars(CONFIG), **changes})
    load_decoder(RandomCheckpoint(config), Precision.of("float32"), None)


def test_rotary_scaling_without_a_table() -> None:
    scaling = RopeScaling("yarn", factor=4.0, original_max_position=8, beta_fast=1e308)
    with pytest.raises(UnsupportedModelError, match="random: rotary scaling: "):
        decoder_of(rope_scaling=scaling)


@pytest.mark.parametrize(("experts", "used"), [(1025, 1), (64, 33)])
def test_more_experts_than_the_router_takes(experts: int, used: int) -> None:
    with pytest.raises(
        UnsupportedModelError, match=f"expected at most 1024 experts and 32 per token, got {experts} an"
    ):
        decoder_of(num_experts=experts, experts_per_token=used)
