"""GGUF files of Kimi Linear: the logits of the folder, forms that other programs write, and what is refused."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from support.families import load, make_model, save_model, some_tokens
from support.gguf_model_file import write_gguf
from support.teacher_forcing import log_probabilities
from torch import Tensor

from fastinfer.errors import FastinferError, GGUFFormatError, UnsupportedModelError
from fastinfer.formats.gguf import GGUFFile
from fastinfer.models.config import Precision
from fastinfer.models.gguf_checkpoint import GGUFCheckpoint
from fastinfer.models.gguf_config import read_gguf_config
from fastinfer.models.hf_checkpoint import HFCheckpoint
from fastinfer.models.loader import load_decoder

FAMILY = "kimi-linear-plain"
OTHER = {"q_lora_rank": 56, "num_hidden_layers": 3, "linear_conv_kernel_dim": 3, "n_shared_experts": 2} | {
    "layer_types": ["full_attention", "linear_attention", "linear_attention"],
    "mlp_layer_types": ["dense", "dense", "sparse"],
}


def logits_of(file: GGUFFile, dtype: str = "float32") -> Tensor:
    decoder = load_decoder(GGUFCheckpoint(file, exact=dtype == "float32"), Precision.of(dtype), None)
    return log_probabilities(decoder, some_tokens(), dtype)


@pytest.mark.parametrize("sizes", [{}, OTHER], ids=["plain", "other"])
@pytest.mark.parametrize("is_fused", [False, True])
def test_logits_are_those_of_the_folder(sizes: dict[str, Any], is_fused: bool, tmp_path: Path) -> None:
    """With the matrices of keys and values apart, or as one as in older files."""
    write_gguf(tmp_path / "model.gguf", save_model(tmp_path, FAMILY, sizes), is_fused=is_fused)
    file = GGUFFile(tmp_path / "model.gguf")
    assert any(name.endswith("attn_kv_b.weight") for name in file.tensors) == is_fused
    expected = log_probabilities(load(tmp_path), some_tokens(), "float32")
    assert (logits_of(file) - expected).abs().max() < 1e-5
    config, other = read_gguf_config(file), HFCheckpoint(tmp_path).config
    for name in ("states", "state_layers", "latent_attention", "attention_scale", "unrotated_layers", "dense_layers"):
        assert getattr(config, name) == getattr(other, name)
    assert config.router == other.router


def test_matrices_in_8_bits(tmp_path: Path) -> None:
    """Projections that two matrices make are among them."""
    model = make_model(FAMILY, hidden_size=128, intermediate_size=160, moe_intermediate_size=64, kv_lora_rank=64)
    write_gguf(tmp_path / "dense.gguf", model)
    exact = logits_of(GGUFFile(tmp_path / "dense.gguf"))
    names = ("attn_q", "attn_k", "attn_v", "ssm_f_a", "ssm_f_b", "ssm_g_a", "ssm_g_b", "ssm_beta", "ffn_down_exps")
    write_gguf(tmp_path / "model.gguf", model, dict.fromkeys(names, gguf.GGMLQuantizationType.Q8_0))
    got = logits_of(GGUFFile(tmp_path / "model.gguf"), "auto")
    assert 0 < (exact.exp() * (exact - got)).sum(-1).mean() < 0.01


def reshaped(file: GGUFFile, end: str, shape: Callable[[tuple[int, ...]], tuple[int, ...]]) -> None:
    for name, tensor in file.tensors.items():
        if name.endswith(end):
            file.tensors[name] = replace(tensor, shape=shape(tensor.shape))


def test_files_of_the_quantiser(tmp_path: Path) -> None:
    """It drops the last dimensions if they have one element."""
    write_gguf(tmp_path / "model.gguf", make_model(FAMILY))
    file = GGUFFile(tmp_path / "model.gguf")
    expected = logits_of(file)
    for part in "qkv":
        reshaped(file, f"ssm_conv1d_{part}.weight", lambda shape: shape[1:])
    reshaped(file, ".ssm_a", lambda shape: (math.prod(shape), 1))
    assert torch.equal(logits_of(file), expected)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_gguf(path, make_model(FAMILY, num_hidden_layers=5))
    return path


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"kda.head_dim": 24}, UnsupportedModelError, "kimi-linear.kda.head_dim must be a multiple of 16 up to 256"),
        ({"kda.head_dim": 0}, GGUFFormatError, "kimi-linear.kda.head_dim"),
        ({"ssm.conv_kernel": 5}, UnsupportedModelError, "ssm.conv_kernel must be from 2 to 4, or 7, got 5"),
        ({"attention.head_count_kv": np.array([0, 0, 0, 1])}, GGUFFormatError, "expected 5 values, one for"),
        ({"attention.head_count_kv": np.array([0] * 5)}, GGUFFormatError, "expected 5 numbers, some 0"),
        ({"attention.head_count_kv": np.array([1] * 5)}, GGUFFormatError, "expected 5 numbers, some 0"),
    ],
)
def test_bad_metadata(change: dict[str, Any], error: type[FastinferError], message: str, good: Path) -> None:
    file = GGUFFile(good)
    file.metadata |= {f"kimi-linear.{key}": value for key, value in change.items()}
    with pytest.raises(error, match=message):
        read_gguf_config(file)


@pytest.mark.parametrize(
    ("name", "other", "message"),
    [
        ("blk.1.ssm_conv1d_k.weight", None, "tensor 'blk.1.ssm_conv1d_k.weight' is missing"),
        ("blk.1.ssm_conv1d_k.weight", "blk.1.ssm_f_b.weight", r"must have the shape \(192, 1, 4\), got \(192, 32\)"),
        ("blk.1.ssm_f_b.weight", None, "tensor 'blk.1.ssm_f_b.weight' is missing"),
        ("blk.1.ssm_a", "output_norm.weight", "tensor 'blk.1.ssm_a' must have the shape"),
    ],
)
def test_damaged_tensors(name: str, other: str | None, message: str, good: Path) -> None:
    file = GGUFFile(good)
    if other is None:
        del file.tensors[name]
    else:
        file.tensors[name] = replace(file.tensors[other], name=name)
    with pytest.raises(GGUFFormatError, match=message):
        load_decoder(GGUFCheckpoint(file), Precision.of("float32"), None)
