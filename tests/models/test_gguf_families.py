"""GGUF files of every family against the models of transformers that they were made from, in fp32."""

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from support.families import HEADS, expected, make_model, some_tokens
from support.gguf_families import GGUF_FAMILIES
from support.gguf_model_file import write_gguf
from support.gguf_unpack_reference import dequantize, random_blocks
from support.teacher_forcing import log_probabilities

from fastinfer.cli.memory_bounds import Weights
from fastinfer.errors import UnsupportedModelError
from fastinfer.formats.gguf import GGUFFile, GGUFTensor, GGUFType
from fastinfer.models.config import Precision
from fastinfer.models.gguf_checkpoint import GGUFCheckpoint
from fastinfer.models.loader import load_decoder


@pytest.mark.parametrize("family", GGUF_FAMILIES)
def test_log_probabilities(family: str, tmp_path: Path) -> None:
    model = make_model(family)
    write_gguf(tmp_path / "model.gguf", model)
    reference = expected(model, some_tokens())
    checkpoint = GGUFCheckpoint(GGUFFile(tmp_path / "model.gguf"), exact=True)
    got = log_probabilities(load_decoder(checkpoint, Precision.of("float32"), None), some_tokens(), "float32")
    assert (got - reference).abs().max() < 1e-3 * max(1.0, float(reference.std()))
    assert (got.argmax(-1) == reference.argmax(-1)).float().mean() >= 0.99


@pytest.mark.parametrize(
    ("family", "architecture"),
    [("qwen2-plain", "qwen2vl"), ("qwen3", "qwen3vl"), ("qwen3-moe-renormalized", "qwen3vlmoe")],
)
def test_the_text_part_of_a_model_that_reads_images(family: str, architecture: str, tmp_path: Path) -> None:
    model = make_model(family)
    write_gguf(tmp_path / "model.gguf", model, name=architecture)
    checkpoint = GGUFCheckpoint(GGUFFile(tmp_path / "model.gguf"), exact=True)
    got = log_probabilities(load_decoder(checkpoint, Precision.of("float32"), None), some_tokens(), "float32")
    assert (got - expected(model, some_tokens())).abs().max() < 1e-4


def test_glm_4_with_images(tmp_path: Path) -> None:
    """Its converter puts the even rotated elements of queries and keys before the odd ones; their tensors are F32."""
    model = make_model("glm4-biases")
    write_gguf(tmp_path / "model.gguf", model)
    reference, file = expected(model, some_tokens()), GGUFFile(tmp_path / "model.gguf")
    file.metadata["glm4.rope.dimension_sections"] = np.array([4, 2, 2, 0], np.int32)
    for name, tensor in file.tensors.items():
        if name.rpartition(".")[0].endswith((".attn_q", ".attn_k")):
            heads = tensor.data.reshape(-1, HEADS["head_dim"], tensor.data.nbytes // tensor.shape[0])
            order = [*range(0, 16, 2), *range(1, 16, 2), *range(16, 32)]
            file.tensors[name] = replace(tensor, data=heads[:, order].reshape(tensor.data.shape))
    got = log_probabilities(
        load_decoder(GGUFCheckpoint(file, exact=True), Precision.of("float32"), None), some_tokens(), "float32"
    )
    assert (got - reference).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["attn_norm.bias", "attn_sub_norm.weight"])
def test_a_tensor_that_nothing_reads(name: str, tmp_path: Path) -> None:
    """Without it the text would be wrong."""
    write_gguf(tmp_path / "model.gguf", make_model("qwen3"))
    file = GGUFFile(tmp_path / "model.gguf")
    norm = file.tensors["blk.1.attn_norm.weight"]
    file.tensors[f"blk.1.{name}"] = replace(norm, name=f"blk.1.{name}")
    with pytest.raises(UnsupportedModelError, match=rf"tensor 'blk.1.{name}' is not supported for qwen3$"):
        load_decoder(GGUFCheckpoint(file), Precision.of("float32"), None)
    file.tensors[f"blk.9.{name}"] = file.tensors.pop(f"blk.1.{name}")  # of a layer for further tokens
    load_decoder(GGUFCheckpoint(file), Precision.of("float32"), None)


def test_keys_that_a_layer_shares_are_not_needed(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", make_model("gemma4-inputs"))
    file = GGUFFile(tmp_path / "model.gguf")
    layer = next(i for i, kept in enumerate(GGUFCheckpoint(file).config.kv_layers) if kept != i)
    name = f"blk.{layer}.attn_k.weight"
    file.tensors.setdefault(name, replace(file.tensors["blk.0.attn_k.weight"], name=name))
    load_decoder(GGUFCheckpoint(file), Precision.of("float32"), None)


# Types of matrices by the last part of their names. Gate and up of one form, of two that become one, and of two tables.
TYPES = [
    {"attn_q": "IQ3_S", "attn_k": "IQ3_S", "attn_v": "IQ2_S", "ffn_gate": "IQ2_XXS", "ffn_up": "IQ2_XXS"},
    {"attn_q": "IQ1_S", "attn_k": "IQ1_M", "attn_v": "IQ2_XS", "ffn_gate": "IQ2_XXS", "ffn_up": "IQ3_XXS"},
    {"attn_output": "TQ1_0", "ffn_down": "TQ2_0", "ffn_gate": "Q4_K", "ffn_up": "IQ3_S", "output": "IQ3_XXS"},
    {"attn_output": "IQ1_S", "ffn_down": "IQ1_M", "ffn_gate": "IQ2_S", "ffn_up": "IQ2_S", "token_embd": "IQ2_XS"},
    {"attn_output": "Q1_0", "ffn_down": "Q2_0", "ffn_gate": "NVFP4", "ffn_up": "NVFP4", "token_embd": "NVFP4"},
]


@pytest.mark.parametrize("types", TYPES, ids=lambda types: " ".join(types.values()))
def test_types_that_no_program_here_writes(types: dict[str, str], tmp_path: Path) -> None:
    """Their blocks are random; transformers has the numbers for which they stand."""
    model = make_model("qwen3", hidden_size=256, intermediate_size=512, head_dim=64)
    write_gguf(tmp_path / "model.gguf", model)
    file = GGUFFile(tmp_path / "model.gguf")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, model.config.num_hidden_layers)
    blocks: list[tuple[str, tuple[int, ...], GGUFType, np.ndarray]] = []
    for name, parameter in model.named_parameters():
        stored = names.get_name(name.removesuffix(".weight"))
        kind = types.get(stored.rpartition(".")[2])
        if kind is None:
            continue
        data = random_blocks(GGUFType[kind], *parameter.shape, 0.003)
        numbers = torch.from_numpy(dequantize(data, GGUFType[kind]))
        factor = 2.0 ** round(np.log2(0.1 / float(numbers.std()))) if kind == "NVFP4" else 1.0
        if factor != 1.0:
            values = np.array([factor], np.float32).view(np.uint8)
            file.tensors[f"{stored}.scale"] = GGUFTensor(f"{stored}.scale", (1,), GGUFType.F32, values[None])
        parameter.data.copy_(numbers * factor)
        blocks.append((f"{stored}.weight", tuple(parameter.shape), GGUFType[kind], data))
    whole, begin = np.concatenate([data.reshape(-1) for *_, data in blocks]), 0
    for stored, shape, kind, data in blocks:
        view = whole[begin : begin + data.size].reshape(data.shape)
        file.tensors[stored] = GGUFTensor(stored, shape, kind, view)
        begin += data.size
    reference = expected(model, some_tokens())
    checkpoint = GGUFCheckpoint(file, exact=True)
    got = log_probabilities(load_decoder(checkpoint, Precision.of("float32"), None), some_tokens(), "float32")
    assert (got - reference).abs().max() < 1e-4 * max(1.0, float(reference.std()))
    fast = GGUFCheckpoint(file)
    tables = fast.config.max_position * fast.config.rotary_dim * 4
    same = types.get("ffn_gate") == types.get("ffn_up")  # if not, they take more than the estimate
    assert fast.weight_bytes("cpu") == pytest.approx(Weights.of(fast).memory_bytes - tables, rel=0.01 if same else 0.15)
    rounded = log_probabilities(load_decoder(fast, Precision.of("auto"), None), some_tokens(), "auto")
    assert (reference.exp() * (reference - rounded)).sum(-1).mean() < 0.05  # inputs of products are int8, too
