"""GGUF files whose tensors fit the model but not each other, or are of a type that few files have there."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from support.gguf_unpack_reference import dequantize, random_blocks
from support.random_checkpoint import RandomCheckpoint
from support.tiny_decoder import CONFIG
from torch import Tensor

from fastinfer.errors import CheckpointFormatError, GGUFFormatError, UnsupportedModelError
from fastinfer.formats.gguf import GGUFFile, GGUFTensor, GGUFType
from fastinfer.formats.gguf_rows import GROUPS_OF_32, LUT_TYPES, ONE_SCALE_TYPES
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


@pytest.mark.parametrize(
    "kind", [*LUT_TYPES, *ONE_SCALE_TYPES, GGUFType.IQ3_S, GGUFType.IQ1_M, GGUFType.IQ2_S, GGUFType.NVFP4]
)
def test_rows_of_an_embedding(tmp_path: Path, kind: GGUFType, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is looked up, and multiplied if it is the last product, too; in parts that end inside a tile."""
    columns = 3 * max(32, kind.block_size)
    data = random_blocks(kind, ROWS, columns)
    expected = torch.from_numpy(dequantize(data, kind))
    file = write(tmp_path / "model.gguf", {"token_embd.weight": (np.ones((ROWS, HIDDEN), np.float32), None)})
    file.tensors["token_embd.weight"] = GGUFTensor("token_embd.weight", (ROWS, columns), kind, data)
    monkeypatch.setattr("fastinfer.models.gguf_checkpoint.PART_ELEMENTS", 16 * columns)
    for exact in (True, False):
        checkpoint = GGUFCheckpoint(file, exact)
        weight = make_weight(checkpoint.parts("embedding", ROWS, columns), 32, "cpu", out_features=ROWS)
        ids, x = torch.tensor([36, 0, 15, 16, 0]), torch.randn(5, columns)
        if exact or kind not in (*GROUPS_OF_32, GGUFType.IQ1_M, GGUFType.IQ2_S, GGUFType.NVFP4):
            assert torch.equal(weight.rows(ids, torch.float32), expected[ids])
            torch.testing.assert_close(weight.linear(x), x @ expected.T, rtol=1e-4, atol=1e-4)
        else:
            error = weight.rows(ids, torch.float32) - expected[ids]
            assert error.square().mean() < 1e-4 * expected.square().mean()


def test_factors_of_nvfp4(tmp_path: Path) -> None:
    """One for a matrix, one for each expert, or none; of a type that has none they are refused."""
    kind, numbers = gguf.GGMLQuantizationType.NVFP4, gguf.GGMLQuantizationType.F32
    single = random_blocks(GGUFType.NVFP4, 64, 192)
    experts = random_blocks(GGUFType.NVFP4, 4 * 64, 192).reshape(4, 64, -1)
    tensors = {
        "token_embd.weight": (np.ones((ROWS, 192), np.float32), numbers),
        "blk.0.attn_v.weight": (single, kind),
        "blk.0.ffn_up_exps.weight": (experts, kind),
        "blk.0.attn_v.scale": (np.array([0.5], np.float32), numbers),
        "blk.0.ffn_up_exps.scale": (np.array([1, 2, 4, 8], np.float32), numbers),
    }
    sizes = {"embedding_length": 192, "expert_count": 4, "expert_used_count": 2}

    def read(name: str, **changes: Any) -> Tensor:
        file = write(tmp_path / "model.gguf", {**tensors, **changes}, **sizes)
        return GGUFCheckpoint(file, exact=True).linear(name, 64, 192).dequantize()

    matrix = torch.from_numpy(gguf.quants.dequantize(single, kind))
    assert torch.equal(read("layers.0.v_proj"), matrix / 2)
    of_experts = torch.from_numpy(gguf.quants.dequantize(experts, kind))
    for expert in range(4):
        assert torch.equal(read(f"layers.0.experts.{expert}.up_proj"), of_experts[expert] * 2**expert)
    with pytest.raises(
        GGUFFormatError, match=r"'blk.0.attn_v.scale' must be F32 with the shape \(1,\), got F32 \(2,\)"
    ):
        read("layers.0.v_proj", **{"blk.0.attn_v.scale": (np.ones(2, np.float32), numbers)})
    with pytest.raises(GGUFFormatError, match=r"'blk.0.attn_v.scale': expected finite numbers, got inf"):
        read("layers.0.v_proj", **{"blk.0.attn_v.scale": (np.full(1, np.inf, np.float32), numbers)})
    with pytest.raises(UnsupportedModelError, match=r"'blk.0.attn_v.scale' is supported for .* NVFP4, got F32"):
        read("layers.0.v_proj", **{"blk.0.attn_v.weight": (np.ones((64, 192), np.float32), numbers)})
    del tensors["blk.0.attn_v.scale"]
    assert torch.equal(read("layers.0.v_proj"), matrix)


@pytest.mark.parametrize("counts", [(16, 15), (17, 16), (0, 16), (16, 32)])
def test_factors_of_longrope(tmp_path: Path, counts: tuple[int, int]) -> None:
    names = ("rope_factors_short.weight", "rope_factors_long.weight")
    single = gguf.GGMLQuantizationType.F32
    tensors = {name: (np.ones(count, np.float32), single) for name, count in zip(names, counts, strict=True) if count}
    tensors["token_embd.weight"] = (np.ones((ROWS, HIDDEN), np.float32), single)
    lengths = {"rope.scaling.original_context_length": 32}
    with pytest.raises(GGUFFormatError, match=r"tensor 'rope_factors_\w+.weight' must be 16 F32 numbers, got"):
        read_gguf_config(write(tmp_path / "bad.gguf", tensors, **lengths))
    tensors |= {
        name: (np.arange(16, dtype=np.float32) + first, single) for name, first in zip(names, (1, 2), strict=True)
    }
    file = write(tmp_path / "model.gguf", tensors, **lengths)
    short, long = (tuple(float(number) for number in range(first, first + 16)) for first in (1, 2))
    expected = RopeScaling("longrope", 64 / 32, 32, short_factors=short, long_factors=long)
    assert read_gguf_config(file).rope_scaling == expected
    file.metadata["llama.rope.scaling.attn_factor"] = 1.3
    assert read_gguf_config(file).rope_scaling == replace(expected, attention_factor=1.3)


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
