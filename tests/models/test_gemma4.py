"""Gemma 4's config.json as published, and settings that are refused in one line."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.families import load, save_model
from support.gguf_model_file import write_gguf

from fastinfer.cli.memory_bounds import Weights
from fastinfer.errors import FastinferError, UnsupportedModelError
from fastinfer.formats.gguf import GGUFFile
from fastinfer.models import open_checkpoint
from fastinfer.models.config import KVShape, ModelConfig
from fastinfer.models.gguf_config import read_gguf_config
from fastinfer.models.hf_config import read_hf_config
from fastinfer.ops import RopeScaling

ROPE = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
TEXT: dict[str, Any] = {
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 12,
    "num_key_value_heads": 2,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2,
    "num_kv_shared_layers": 6,
    "use_double_wide_mlp": True,
    "final_logit_softcapping": 30.0,
    "rope_parameters": ROPE,
}


def read(folder: Path, **changes: Any) -> ModelConfig:
    values = {"architectures": ["Gemma4ForConditionalGeneration"], "text_config": TEXT | changes}
    (folder / "config.json").write_text(json.dumps(values))
    return read_hf_config(folder / "config.json")


def test_inputs_by_layer_and_shared_keys(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert config.kv_layers == (0, 1, 2, 3, 4, 5, 4, 4, 4, 4, 4, 5)
    assert (config.kv_shape(4), config.kv_shape(5)) == (KVShape(2, 256), KVShape(2, 512))
    assert [config.mlp_size(layer) for layer in (5, 6)] == [10240, 20480]
    assert (config.per_layer_size, config.tied_kv_layers, config.attention_scale) == (256, set(), 1.0)
    assert config.windows == ((512,) * 5 + (0,)) * 2
    assert (config.rotary_dim, config.local_rotary_dim, config.local_rope_theta) == (512, 256, 1e4)
    assert config.rope_scaling == RopeScaling("proportional", num_rotated=128)
    assert config.logits_softcap == 30.0


def test_keys_as_values_and_experts(tmp_path: Path) -> None:
    moe = {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}
    keys = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "global_head_dim": 384}
    plain = {"num_kv_shared_layers": 0, "use_double_wide_mlp": False, "hidden_size_per_layer_input": 0}
    config = read(tmp_path, **moe, **keys, **plain)
    assert (config.kv_shape(5), config.kv_layers, config.tied_kv_layers) == (KVShape(1, 384), (), {5, 11})
    assert (config.num_experts, config.experts_per_token, config.mlp_beside_experts) == (128, 8, True)
    assert (config.mlp_size(0), config.dense_intermediate_size) == (704, 10240)
    assert config.router.renormalize
    # Settings of experts do not count without the block.
    assert read(tmp_path, **moe | {"enable_moe_block": False}, **keys, **plain).num_experts == 0


def test_the_last_layer_has_full_attention_always(tmp_path: Path) -> None:
    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    config = read(tmp_path, num_hidden_layers=3, layer_types=kinds, num_kv_shared_layers=0)
    assert config.windows == (0, 512, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention must be null or 'vision', got 'all'"),
        ({"vocab_size_per_layer_input": 7}, "vocab_size_per_layer_input must be vocab_size = 262144, got 7"),
        ({"hidden_activation": "silu"}, "hidden_activation must be a gelu .* got silu"),
        ({"num_kv_shared_layers": 12}, "num_kv_shared_layers: expected 0 to 11, got 12"),
        ({"num_kv_shared_layers": 8}, "num_kv_shared_layers: expected layers with keys and values of each kind"),
        ({"num_key_value_heads": 3}, "expected a multiple of 3 query heads, got 8"),
        ({"use_sliding_window": False}, "use_sliding_window must be true, got false"),
        ({"sliding_window": 0}, "sliding_window: expected 1 to"),
        ({"global_head_dim": 511}, "sizes of heads must be even, got 256 and 511"),
        ({"enable_moe_block": True}, "num_experts is missing"),
        ({"per_layer_config": {"5": {"head_dim": 128}}}, "layers of one kind .* 2 of 256 in layer 5, got 2 of 128"),
        ({"per_layer_config": {"5": {"hidden_size": 1}}}, "per_layer_config: hidden_size is not implemented"),
        (
            {"rope_parameters": ROPE | {"full_attention": {"rope_type": "yarn", "rope_theta": 1e6}}},
            "rope_type must be 'proportional' for full_attention, got 'yarn'",
        ),
        (
            {"rope_parameters": ROPE | {"sliding_attention": {"rope_type": "linear", "rope_theta": 1e4}}},
            "rope_type must be 'default' for sliding_attention, got 'linear'",
        ),
        (
            {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 64},
            "use_double_wide_mlp must be false with enable_moe_block",
        ),
    ],
)
def test_settings_that_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(FastinferError, match=message) as error:
        read(tmp_path, **changes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("family", ["gemma4", "gemma4-inputs", "gemma4-moe"])
def test_memory_is_that_of_the_loaded_model(family: str, tmp_path: Path) -> None:
    """A step reads no embedding; all the rest is counted in memory."""
    save_model(tmp_path, family)
    weights = Weights.of(open_checkpoint(tmp_path))
    total, seen = 0, set()

    def visit(part: Any) -> None:
        nonlocal total
        if isinstance(part, torch.Tensor):
            if part.data_ptr() not in seen:
                seen.add(part.data_ptr())
                total += part.nbytes
        elif isinstance(part, tuple):
            for each in part:
                visit(each)
        elif hasattr(part, "__dataclass_fields__"):
            for name in part.__dataclass_fields__:
                visit(getattr(part, name))

    decoder = load(tmp_path, "auto")
    visit(decoder)
    assert weights.memory_bytes == total
    if decoder.per_layer_inputs is not None:
        embedding = decoder.per_layer_inputs.embedding
        visited = total
        visit(embedding)
        assert total == visited  # it was part of the model
        assert weights.step_bytes < total - embedding.values.nbytes


def test_a_gguf_file_with_other_rotary_sizes_is_refused(tmp_path: Path) -> None:
    from support.families import make_model

    write_gguf(tmp_path / "model.gguf", make_model("gemma4"))
    file = GGUFFile(tmp_path / "model.gguf")
    assert read_gguf_config(file).kv_shape(0) == KVShape(2, 32)
    rotary = file.tensors.pop("rope_freqs.weight")
    with pytest.raises(FastinferError, match=r"tensor 'rope_freqs.weight' is missing"):
        read_gguf_config(file)
    file.tensors["rope_freqs.weight"] = rotary
    for key, value, message in (
        ("rope.dimension_count", 12, "gemma4.rope.dimension_count must be 48, got 12"),
        ("attention.key_length", 47, "expected an even size of heads and a divisor of 4 query heads in layer 2, got "),
        ("attention.shared_kv_layers", 5, "shared_kv_layers: expected layers with keys and values of each kind"),
    ):
        before = file.metadata[f"gemma4.{key}"]
        file.metadata[f"gemma4.{key}"] = value
        with pytest.raises(FastinferError, match=message):
            read_gguf_config(file)
        file.metadata[f"gemma4.{key}"] = before


def test_the_model_without_encoders(tmp_path: Path) -> None:
    values = {
        "architectures": ["Gemma4UnifiedForConditionalGeneration"],
        "text_config": TEXT | {"num_kv_shared_layers": 0},
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = read_hf_config(tmp_path / "config.json")
    assert (config.per_layer_size, config.windows[0], config.max_position) == (0, 1024, 262144)
    values["text_config"]["use_bidirectional_attention"] = "all"  # type: ignore[index]
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(UnsupportedModelError):
        read_hf_config(tmp_path / "config.json")
