"""Kimi Linear: names and settings of published files, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import load, make_model, save_model, some_tokens
from support.teacher_forcing import log_probabilities

from fastinfer.errors import FastinferError
from fastinfer.models.config import ModelConfig
from fastinfer.models.hf_config import read_hf_config
from fastinfer.models.state_config import LinearAttentionConfig


def changed(folder: Path, **changes: Any) -> Path:
    """A config.json with these changes; ``None`` removes a key."""
    make_model("kimi-linear").config.save_pretrained(folder)
    path = folder / "config.json"
    values = json.loads(path.read_text()) | {"architectures": ["KimiLinearForCausalLM"]} | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    return path


def published(**changes: Any) -> dict[str, Any]:
    """Changes that give a config.json the form of published files, whose layers have numbers from 1 on."""
    sizes = {"head_dim": 32, "num_heads": 5, "short_conv_kernel_size": 4}
    kinds = {"full_attn_layers": [5, 9], "kda_layers": [1, 2, 3, 4, 6, 7, 8]}
    left_out = ("layer_types", "mlp_layer_types", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim")
    return {
        **dict.fromkeys(left_out),
        "linear_attn_config": sizes | kinds | changes,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "moe_router_activation_func": "sigmoid",
        "mla_use_nope": True,
        "rope_theta": 10000.0,
        "use_grouped_topk": True,
    }


def test_sizes(tmp_path: Path) -> None:
    config = read_hf_config(changed(tmp_path))
    assert config.states == LinearAttentionConfig(
        *(5, 5, 32, 32, 4),
        separate_projections=True,
        channel_decay=True,
        decay_rank=32,
        gate_rank=32,
        sigmoid_gate=True,
    )
    assert config.state_layers == (True, True, True, True, False, True, True, True, False)
    assert config.unrotated_layers == frozenset(range(9))
    assert (config.dense_layers, config.num_experts, config.experts_per_token) == ({0}, 7, 3)


def test_published_files(tmp_path: Path) -> None:
    """Their dense layer has another name than in files of transformers, and their config.json an object of sizes."""
    save_model(tmp_path, "kimi-linear")
    expected = log_probabilities(load(tmp_path), some_tokens(), "float32")
    written = read_hf_config(tmp_path / "config.json")
    tensors = load_file(tmp_path / "model.safetensors")
    dense = "layers.0.block_sparse_moe."
    assert any(dense in name for name in tensors)
    save_file(
        {name.replace(dense, "layers.0.mlp."): values for name, values in tensors.items()},
        tmp_path / "model.safetensors",
    )
    assert read_hf_config(changed(tmp_path, **published())) == written
    assert torch.equal(log_probabilities(load(tmp_path), some_tokens(), "float32"), expected)


def test_kinds_of_layers_by_default(tmp_path: Path) -> None:
    plain = read_hf_config(changed(tmp_path, layer_types=None))
    assert plain.state_layers == (True, True, True, True, False, True, True, True, False)
    listed: ModelConfig = read_hf_config(
        changed(tmp_path, **published(full_attn_layers=[2, 3], kda_layers=[1, 4, 5, 6, 7, 8, 9]))
    )
    assert [layer for layer, has_state in enumerate(listed.state_layers) if not has_state] == [1, 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_head_dim": 24}, "linear_key_head_dim must be a multiple of 16 up to 256, got 24"),
        ({"linear_conv_kernel_dim": 5}, "linear_conv_kernel_dim must be from 2 to 4, or 7, got 5"),
        ({"linear_num_heads": 0}, "linear_num_heads"),
        ({"mla_use_nope": False}, "mla_use_nope must be True, got False"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func must be 'sigmoid', got 'softmax'"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        ({"attention_bias": True}, "attention_bias must be False, got True"),
        ({"layer_types": ["linear_attention"] * 9}, "layer_types: expected at least one full_attention, got none"),
        ({"layer_types": ["linear_attention"] * 3}, "layer_types: expected 9 of linear_attention and full_attention"),
        (published(kda_layers=[1, 2, 3, 4, 6, 7]), "full_attn_layers and kda_layers: expected each of 1..9 once"),
        (published(kda_layers=[1, 2, 3, 4, 5, 6, 7, 8]), "full_attn_layers and kda_layers: expected each of 1..9 once"),
        (published(kda_layers=[True, 2, 3, 4, 6, 7, 8]), "full_attn_layers and kda_layers: expected each of 1..9 once"),
        (published(kda_layers=["1", 2, 3, 4, 6, 7, 8]), "full_attn_layers and kda_layers: expected each of 1..9 once"),
        (published(kda_layers=[[1], 2, 3, 4, 6, 7, 8]), "full_attn_layers and kda_layers: expected each of 1..9 once"),
        ({"linear_attn_config": [1]}, "linear_attn_config"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(FastinferError) as error:
        read_hf_config(changed(tmp_path, **changes))
    assert message in str(error.value)
    assert "\n" not in str(error.value)
