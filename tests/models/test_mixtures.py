"""Families with mixtures of experts: names of their settings, what their own program ignores, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.families import make_model, some_tokens
from support.gguf_model_file import write_gguf
from support.teacher_forcing import log_probabilities

from fastinfer.errors import CheckpointFormatError, GGUFFormatError, UnsupportedModelError
from fastinfer.formats.gguf import GGUFFile
from fastinfer.models.config import ModelConfig, Precision, RouterConfig
from fastinfer.models.decoder import Decoder
from fastinfer.models.gguf_checkpoint import GGUFCheckpoint
from fastinfer.models.gguf_config import read_gguf_config
from fastinfer.models.hf_config import read_hf_config
from fastinfer.models.loader import load_decoder

SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "moe_intermediate_size": 256,
    "num_attention_heads": 16,
    "num_hidden_layers": 8,
    "num_key_value_heads": 4,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
}
SIGMOID = RouterConfig("sigmoid", has_bias=True)


def read(folder: Path, architecture: str, **values: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture], **SIZES, **values}))
    return read_hf_config(folder / "config.json")


def load(file: GGUFFile) -> Decoder:
    return load_decoder(GGUFCheckpoint(file, exact=True), Precision.of("float32"), None)


def test_trinity(tmp_path: Path) -> None:
    name, published = "AfmoeForCausalLM", {"score_func": "sigmoid", "route_norm": True, "num_expert_groups": 1}
    config = read(tmp_path, name, mup_enabled=True, num_dense_layers=2, route_scale=2.5, **published)
    assert config.embedding_scale == 32.0
    assert config.windows == (1024, 1024, 1024, 0) * 2
    assert config.unrotated_layers == {3, 7}
    assert (config.dense_layers, config.shared_intermediate_size) == ({0, 1}, 512)
    # Its program has no groups, and divides by the sum of the weights whatever the file says.
    config = read(tmp_path, name, n_group=4, topk_group=2, norm_topk_prob=False, global_attn_every_n_layers=2)
    assert (config.router, config.embedding_scale) == (SIGMOID, 1.0)
    assert config.windows == (1024, 0) * 4
    assert read(tmp_path, name, layer_types=["full_attention"] * 8).unrotated_layers == set(range(8))
    with pytest.raises(UnsupportedModelError, match="attention_bias must be False, got True"):
        read(tmp_path, name, attention_bias=True)


@pytest.mark.parametrize("name", ["ExaoneMoeForCausalLM", "ExaoneMoEForCausalLM"])
def test_exaone_moe(name: str, tmp_path: Path) -> None:
    full = {"layer_types": ["full_attention"] * 8, "sliding_window": 128}
    published = {"sliding_window_pattern": "LLLG", "num_nextn_predict_layers": 1, "scoring_func": "sigmoid"}
    config = read(tmp_path, name, n_group=2, num_shared_experts=3, **full, **published)
    assert config.router == RouterConfig("sigmoid", True, num_groups=2, renormalize=True, scale=2.5)
    assert (config.windows, config.unrotated_layers) == ((0,) * 8, set(range(8)))
    assert (config.dense_layers, config.shared_intermediate_size) == ({0}, 768)


def test_hunyuan_3(tmp_path: Path) -> None:
    name = "HYV3ForCausalLM"
    # Its program has no groups, and reads the layers without experts from their list alone.
    ignored = {"n_group": 4, "topk_group": 2, "norm_topk_prob": False, "first_k_dense_replace": 3}
    config = read(tmp_path, name, num_shared_experts=2, num_nextn_predict_layers=1, **ignored)
    assert config.router == RouterConfig("sigmoid", has_bias=True, scale=2.826)
    assert (config.rope_theta, config.norm_eps, config.head_dim) == (11158840.0, 1e-5, 128)
    assert (config.dense_layers, config.shared_intermediate_size) == ({0}, 512)
    assert read(tmp_path, name, mlp_layer_types=["sparse"] * 7 + ["dense"]).dense_layers == {7}
    with pytest.raises(UnsupportedModelError, match="mlp_bias must be False, got True"):
        read(tmp_path, name, mlp_bias=True)


def test_mimo(tmp_path: Path) -> None:
    """Published files have other names, too, which its program does not read."""
    name = "MiMoV2FlashForCausalLM"
    sizes = {"num_key_value_heads": 2, "n_routed_experts": 16, "num_hidden_layers": 7, "head_dim": 192}
    published = {
        "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0, 1],
        "moe_layer_freq": [0, 1, 1, 1, 1, 1, 1],
        "layernorm_epsilon": 1e-5,
        "n_shared_experts": None,
        "partial_rotary_factor": 0.5,
        "rope_theta": 3e6,
        "routed_scaling_factor": None,
        "scoring_func": "sigmoid",
        "sliding_window": 128,
        "sliding_window_size": 128,
        "swa_num_key_value_heads": 4,
        "swa_rope_theta": 2e4,
        "topk_method": "noaux_tc",
        "v_head_dim": 128,
    }
    config = read(tmp_path, name, **sizes, **published)
    assert config.windows == (0, 129, 129, 129, 129, 0, 129)
    assert [config.kv_shape(layer).num_heads for layer in range(7)] == [2, 4, 4, 4, 4, 2, 4]
    assert [layer for layer in range(7) if config.has_sinks(layer)] == [1, 2, 3, 4, 6]
    assert (config.rope_theta, config.local_rope_theta) == (5e6, 1e4)
    assert (config.rotary_dim, config.local_rotary_dim) == (64, 0)
    assert (config.value_dim, config.value_scale, config.attention_size(1)) == (128, 0.707, 16 * 128)
    assert (config.router, config.shared_intermediate_size, config.dense_layers) == (SIGMOID, 0, {0})
    for changes, message in (
        ({"v_head_dim": 200}, "v_head_dim must be at most head_dim = 192, got 200"),
        ({"num_key_value_heads": 16}, "expected a multiple of 32 query heads, which layers with a window need, got 16"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters.full_attention is missing"),
    ):
        with pytest.raises((CheckpointFormatError, UnsupportedModelError), match=message):
            read(tmp_path, name, **sizes | changes)


def test_values_smaller_than_keys(tmp_path: Path) -> None:
    sizes = {"n_routed_experts": 16, "num_hidden_layers": 2, "head_dim": 8, "v_head_dim": 6}
    config = read(tmp_path, "MiMoV2FlashForCausalLM", **sizes, num_key_value_heads=2)
    assert config.value_rows(0).tolist() == [0, 1, 2, 3, 4, 5, 5, 5, 6, 7, 8, 9, 10, 11, 11, 11]
    assert (config.value_size(0), config.value_size(1)) == (12, 24)


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("MiniMaxM3SparseForConditionalGeneration", "sparse attention to blocks that an index of the keys chooses"),
        ("PaliGemmaForConditionalGeneration", "attention in both directions within a prompt"),
    ],
)
def test_families_that_need_more(name: str, missing: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=f"architecture {name} is not implemented: it needs {missing}"):
        read(tmp_path, name)


def test_layers_with_windows_in_gguf_files(tmp_path: Path) -> None:
    """Their list may have layers for further tokens, too."""
    write_gguf(tmp_path / "model.gguf", make_model("exaone-moe-other"))
    file, key = GGUFFile(tmp_path / "model.gguf"), "exaone-moe.attention.sliding_window_pattern"
    assert file.metadata[key].tolist() == [False, True, True, False]
    file.metadata |= {key: np.array([True, False, True, False, True])}
    file.metadata |= {"exaone-moe.block_count": 5, "exaone-moe.nextn_predict_layers": 1}
    config = read_gguf_config(file)
    assert (config.windows, config.unrotated_layers) == ((16, 0, 16, 0), {1, 3})
    file.metadata[key] = np.array([True, False, True])
    with pytest.raises(GGUFFormatError, match="sliding_window_pattern: expected 5 values, one for each layer, got 3"):
        read_gguf_config(file)


def test_heads_of_mimos_gguf_files(tmp_path: Path) -> None:
    """Their lists may have layers for further tokens, too."""
    write_gguf(tmp_path / "model.gguf", make_model("mimo-v2-flash"))
    file = GGUFFile(tmp_path / "model.gguf")
    plain = read_gguf_config(file)
    longer = {
        "block_count": 9,
        "nextn_predict_layers": 2,
        "attention.head_count_kv": np.array([2, 4, 4, 4, 4, 2, 4, 4, 4]),
    }
    file.metadata |= {f"mimo2.{key}": value for key, value in longer.items()}
    assert read_gguf_config(file) == plain
    assert [shape.num_heads for shape in plain.kv_shapes] == [2, 4, 4, 4, 4, 2, 4]
    for key, value, message in (
        ("head_count_kv", np.array([2, 3, 4, 4, 4, 2, 4, 4, 4]), "expected a multiple of 3 query heads, got 4"),
        ("value_length", 33, "value_length must be at most 32, the length of keys, got 33"),
    ):
        changed = GGUFFile(tmp_path / "model.gguf")
        changed.metadata |= file.metadata | {f"mimo2.attention.{key}": value}
        with pytest.raises((GGUFFormatError, UnsupportedModelError), match=message):
            read_gguf_config(changed)


def test_fused_matrices_with_values_smaller_than_keys(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", make_model("mimo-v2-flash"))
    file = GGUFFile(tmp_path / "model.gguf")
    expected = log_probabilities(load(file), some_tokens(), "float32")
    for layer in range(7):
        parts = [file.tensors.pop(f"blk.{layer}.attn_{part}.weight") for part in "qkv"]
        name, rows = f"blk.{layer}.attn_qkv.weight", np.concatenate([part.data for part in parts])
        file.tensors[name] = replace(parts[0], name=name, shape=(len(rows), parts[0].shape[1]), data=rows)
    assert torch.equal(log_probabilities(load(file), some_tokens(), "float32"), expected)
