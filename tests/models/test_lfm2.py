"""LFM2: what its configurations and files say of layers with short convolutions, and what is refused."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from safetensors.torch import load_file, save_file
from support.families import load, make_model
from support.gguf_model_file import write_gguf

from fastinfer.errors import CheckpointFormatError, FastinferError, GGUFFormatError, UnsupportedModelError
from fastinfer.formats.gguf import GGUFFile
from fastinfer.models.gguf_config import read_gguf_config
from fastinfer.models.hf_config import read_hf_config
from fastinfer.models.state_config import ShortConvConfig

CONVS = (True, True, False, True, False, True)


def changed(folder: Path, family: str = "lfm2", **changes: Any) -> Path:
    """A config.json with these changes; ``None`` removes a key."""
    model = make_model(family)
    model.config.save_pretrained(folder)
    path = folder / "config.json"
    values = json.loads(path.read_text()) | {"architectures": [type(model).__name__]} | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    return path


def test_layers_and_sizes(tmp_path: Path) -> None:
    config = read_hf_config(changed(tmp_path))
    assert config.state_layers == CONVS
    assert config.states == ShortConvConfig(64, 3)
    assert (config.intermediate_size, config.norm_eps, config.rope_theta, config.qk_norm) == (64, 1e-5, 1e6, "head")
    assert read_hf_config(changed(tmp_path, conv_L_cache=7)).states == ShortConvConfig(64, 7)
    moe = read_hf_config(changed(tmp_path, "lfm2-moe"))
    assert moe.dense_layers == {0, 1}
    assert (moe.intermediate_size, moe.dense_intermediate_size) == (48, 96)
    assert (moe.router.scoring, moe.router.has_bias, moe.router.renormalize) == ("sigmoid", True, True)


def test_names_of_the_first_published_files(tmp_path: Path) -> None:
    old = {"layer_types": None, "full_attn_idxs": [2, 4], "intermediate_size": None, "block_ff_dim": 384}
    config = read_hf_config(changed(tmp_path, **old, block_ffn_dim_multiplier=1.1, use_pos_enc=True))
    assert config.state_layers == CONVS
    assert config.intermediate_size == 288  # 1.1 * 256, up to a multiple of 32
    assert read_hf_config(changed(tmp_path, **old, block_auto_adjust_ff_dim=False)).intermediate_size == 384
    old |= {"block_ff_dim": 100, "block_ffn_dim_multiplier": 1.5, "block_multiple_of": 9}
    assert read_hf_config(changed(tmp_path, **old)).intermediate_size == 99  # 66 * 1.5, not 66.7 * 1.5


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"layer_types": ["conv"] * 5}, CheckpointFormatError, "expected 6 of conv and full_attention"),
        ({"layer_types": ["sliding_attention"] * 6}, CheckpointFormatError, "expected 6 of conv and full_attention"),
        ({"layer_types": ["conv"] * 6}, UnsupportedModelError, "at least one full_attention, got none"),
        ({"layer_types": ["full_attention"] * 6}, UnsupportedModelError, "at least one conv, got none"),
        ({"conv_L_cache": 5}, UnsupportedModelError, "conv_L_cache must be from 2 to 4, or 7, got 5"),
        ({"conv_L_cache": "3"}, CheckpointFormatError, "conv_L_cache"),
        ({"conv_bias": 1}, CheckpointFormatError, "conv_bias"),
        ({"block_multiple_of": 0}, CheckpointFormatError, "block_multiple_of"),
        ({"block_ffn_dim_multiplier": -1.0}, CheckpointFormatError, "block_ffn_dim_multiplier"),
        ({"block_use_swiglu": False}, UnsupportedModelError, "block_use_swiglu must be True, got False"),
    ],
)
def test_bad_configurations(changes: dict[str, Any], error: type[FastinferError], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        read_hf_config(changed(tmp_path, **changes))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("conv.conv.weight", lambda values: values[:, :, 1:].contiguous()),
        ("conv.in_proj.weight", lambda values: values[1:].contiguous()),
        ("conv.in_proj.bias", lambda values: None),
        ("conv.conv.bias", lambda values: values[1:].clone()),
        ("conv.out_proj.weight", lambda values: None),
        ("operator_norm.weight", lambda values: None),
    ],
)
def test_damaged_tensors(name: str, change: Any, tmp_path: Path) -> None:
    make_model("lfm2-biases").save_pretrained(tmp_path)
    tensors, name = load_file(tmp_path / "model.safetensors"), f"model.layers.1.{name}"
    values = change(tensors.pop(name))
    save_file(tensors if values is None else tensors | {name: values}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointFormatError, match=name.removesuffix(".weight")):
        load(tmp_path)


def test_layers_and_sizes_of_a_gguf_file(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", make_model("lfm2-moe"))
    config = read_gguf_config(GGUFFile(tmp_path / "model.gguf"))
    assert config.state_layers == CONVS
    assert config.states == ShortConvConfig(64, 3)
    assert (config.num_kv_heads, config.intermediate_size, config.dense_intermediate_size) == (2, 48, 96)


def test_lengths_of_the_convolution_in_a_gguf_file(tmp_path: Path) -> None:
    model = make_model("lfm2")
    for length in (7, 5):
        model.config.conv_L_cache = length
        write_gguf(tmp_path / f"{length}.gguf", model)
    assert read_gguf_config(GGUFFile(tmp_path / "7.gguf")).states == ShortConvConfig(64, 7)
    with pytest.raises(UnsupportedModelError, match=r"lfm2\.shortconv\.l_cache must be from 2 to 4, or 7, got 5"):
        read_gguf_config(GGUFFile(tmp_path / "5.gguf"))


@pytest.mark.parametrize("heads", [[0, 2], [2] * 6, [0] * 6, [0, 0, 2, 0, 4, 0], 2])
def test_bad_numbers_of_heads_in_a_gguf_file(heads: Any, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "lfm2")
    writer.add_embedding_length(64)
    writer.add_block_count(6)
    writer.add_head_count(4)
    writer.add_head_count_kv(heads)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(GGUFFormatError, match=r"lfm2\.attention\.head_count_kv"):
        read_gguf_config(GGUFFile(tmp_path / "model.gguf"))
