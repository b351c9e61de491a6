"""GGUF files of models with linear attention: quantised and fused tensors, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from support.families import expected, make_model, save_model, some_tokens
from support.gguf_model_file import write_gguf
from support.teacher_forcing import log_probabilities
from torch import Tensor

from fastinfer.errors import FastinferError, GGUFFormatError, UnsupportedModelError
from fastinfer.formats.gguf import GGUFFile
from fastinfer.models.config import Precision
from fastinfer.models.decoder import Decoder
from fastinfer.models.gguf_checkpoint import GGUFCheckpoint
from fastinfer.models.gguf_config import read_gguf_config
from fastinfer.models.hf_checkpoint import HFCheckpoint
from fastinfer.models.loader import load_decoder
from fastinfer.models.state_config import LinearAttentionConfig

Q8_0 = gguf.GGMLQuantizationType.Q8_0


def load(path: Path, exact: bool = True) -> Decoder:
    return load_decoder(GGUFCheckpoint(GGUFFile(path), exact), Precision.of("float32"), None)


def logits_of(decoder: Decoder) -> Tensor:
    return log_probabilities(decoder, some_tokens(), "float32")


@pytest.mark.parametrize("family", ["qwen3.5", "qwen3.5-moe", "qwen3-next-plain"])
def test_logits(family: str, tmp_path: Path) -> None:
    model = make_model(family)
    write_gguf(tmp_path / "model.gguf", model)
    assert (logits_of(load(tmp_path / "model.gguf")) - expected(model, some_tokens())).abs().max() < 1e-4


def test_sizes_are_those_of_the_folder(tmp_path: Path) -> None:
    """But the order of the value heads, which matters where a key head has several of them."""
    write_gguf(tmp_path / "model.gguf", save_model(tmp_path, "qwen3.5"))
    config, other = read_gguf_config(GGUFFile(tmp_path / "model.gguf")), HFCheckpoint(tmp_path).config
    assert config.states == LinearAttentionConfig(2, 6, 16, 48, 4, tiled_output=True)
    assert config.state_layers == other.state_layers
    assert (config.rotary_dim, config.output_gate, config.qk_norm) == (8, True, "head")


@pytest.mark.parametrize("family", ["qwen3.5-moe", "qwen3-next-plain", "qwen3-moe-renormalized"])
def test_fused_tensors(family: str, tmp_path: Path) -> None:
    """One tensor of gate and up of all experts; Qwen3-Next's matrices by key head, which older files have."""
    model = make_model(family)
    write_gguf(tmp_path / "apart.gguf", model)
    write_gguf(tmp_path / "fused.gguf", model, is_fused=True)
    names = GGUFFile(tmp_path / "fused.gguf").tensors
    assert "blk.0.ffn_gate_up_exps.weight" in names
    assert ("blk.0.ssm_in.weight" in names) == family.startswith("qwen3-next")
    assert torch.equal(logits_of(load(tmp_path / "apart.gguf")), logits_of(load(tmp_path / "fused.gguf")))


def test_quantised_tensors_are_reordered_as_dense_ones(tmp_path: Path) -> None:
    """Against a model that has the same quantised numbers, which are rounded in the file's order."""
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_value_head_dim": 32}
    model = make_model("qwen3.5", num_hidden_layers=4, **sizes)
    names = ("attn_qkv", "attn_gate", "ssm_out", "ssm_alpha", "ssm_beta", "attn_q", "ffn_down")
    write_gguf(tmp_path / "model.gguf", model, dict.fromkeys(names, Q8_0))
    assert GGUFFile(tmp_path / "model.gguf").tensors["blk.0.ssm_out.weight"].type.name == "Q8_0"
    with torch.no_grad():  # groups of 32 columns lie within a head, so the order does not matter
        for name, parameter in model.named_parameters():
            if name.endswith(
                ("in_proj_qkv.weight", "in_proj_z.weight", "out_proj.weight", "in_proj_a.weight", "in_proj_b.weight")
            ) or name.endswith(("q_proj.weight", "down_proj.weight")):
                rounded = gguf.dequantize(gguf.quantize(parameter.numpy(), Q8_0), Q8_0)
                parameter.copy_(torch.from_numpy(np.array(rounded)))
    assert (logits_of(load(tmp_path / "model.gguf")) - expected(model, some_tokens())).abs().max() < 1e-4


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_gguf(path, make_model("qwen3.5", num_hidden_layers=4))
    return path


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"ssm.time_step_rank": 5}, GGUFFormatError, "qwen35.ssm.time_step_rank: expected a multiple of 2, got 5"),
        ({"ssm.inner_size": 287}, GGUFFormatError, "qwen35.ssm.inner_size: expected a multiple of 6, got 287"),
        ({"ssm.state_size": 24}, UnsupportedModelError, "ssm.state_size must be a multiple of 16 up to 256, got 24"),
        ({"ssm.inner_size": 6}, UnsupportedModelError, "time_step_rank must be a multiple of 16 up to 256, got 1"),
        ({"ssm.conv_kernel": 5}, UnsupportedModelError, "qwen35.ssm.conv_kernel must be from 2 to 4, or 7, got 5"),
        ({"ssm.group_count": 0}, GGUFFormatError, "qwen35.ssm.group_count"),
        ({"full_attention_interval": 1}, UnsupportedModelError, "full_attention_interval: expected layers with linear"),
        ({"full_attention_interval": 5}, UnsupportedModelError, "among 4, got 5"),
        (
            {"attention.recurrent_layers": np.array([True] * 4)},
            UnsupportedModelError,
            r"recurrent_layers: expected layers with linear attention and layers with full attention, got \[True, True",
        ),
        (
            {"attention.recurrent_layers": np.array([True, False])},
            GGUFFormatError,
            "recurrent_layers: expected 4 values, one for each layer, got 2",
        ),
    ],
)
def test_bad_metadata(change: dict[str, Any], error: type[FastinferError], message: str, good: Path) -> None:
    file = GGUFFile(good)
    if "full_attention_interval" in change:  # which counts in older files
        del file.metadata["qwen35.attention.recurrent_layers"]
    file.metadata |= {f"qwen35.{key}": value for key, value in change.items()}
    with pytest.raises(error, match=message):
        read_gguf_config(file)


def other_shape(file: GGUFFile, name: str) -> None:
    file.tensors[name] = file.tensors["output_norm.weight"]


def missing(file: GGUFFile, name: str) -> None:
    del file.tensors[name]


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("blk.0.ssm_a", missing, "tensor 'blk.0.ssm_a' is missing"),
        ("blk.0.ssm_a", other_shape, "tensor 'blk.0.ssm_a' must have the shape"),
        ("blk.0.ssm_dt.bias", missing, "tensor 'blk.0.ssm_dt.bias' is missing"),
        ("blk.0.ssm_conv1d.weight", other_shape, "tensor 'blk.0.ssm_conv1d.weight' must have the shape"),
        ("blk.0.attn_gate.weight", missing, "tensor 'blk.0.attn_gate.weight' is missing"),
        ("blk.0.ssm_out.weight", other_shape, "tensor 'blk.0.ssm_out.weight' must have the shape"),
    ],
)
def test_damaged_tensors(name: str, damage: Callable[[GGUFFile, str], Any], message: str, good: Path) -> None:
    file = GGUFFile(good)
    damage(file, name)
    with pytest.raises(GGUFFormatError, match=message):
        load_decoder(GGUFCheckpoint(file), Precision.of("float32"), None)


def test_decays_that_grow_are_refused(tmp_path: Path) -> None:
    model = make_model("qwen3.5", num_hidden_layers=4)
    with torch.no_grad():
        model.model.layers[0].linear_attn.A_log[1] = -torch.inf  # stored as 0
    write_gguf(tmp_path / "model.gguf", model)
    with pytest.raises(GGUFFormatError, match=r"tensor 'blk.0.ssm_a' must be negative, got -?0.0"):
        load(tmp_path / "model.gguf")


def test_windows_of_files_that_do_not_say_them(tmp_path: Path) -> None:
    for family, window in (("gpt-oss", 128), ("gemma2-plain", 4096)):
        write_gguf(tmp_path / "model.gguf", make_model(family))
        file = GGUFFile(tmp_path / "model.gguf")
        architecture = file.metadata["general.architecture"]
        assert max(read_gguf_config(file).windows) == 16
        del file.metadata[f"{architecture}.attention.sliding_window"]
        windows = read_gguf_config(file).windows
        assert windows[:3] == (window, 0, window)
