"""Bailing hybrid: settings of published files, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.families import make_model

from fastinfer.errors import FastinferError
from fastinfer.models.hf_config import read_hf_config
from fastinfer.models.state_config import LinearAttentionConfig

# As published files have them: other names than in those of transformers, and a width of heads that it overwrites.
PUBLISHED = {
    "architectures": ["BailingMoeV3ForCausalLM"],
    "head_dim": 32,
    "partial_rotary_factor": 0.5,
    "rotary_dim": 8,
    "rope_scaling": None,
    "no_kda_lora": True,
    "gated_attention_proj_granularity_type": "head_wise",
    "expert_swiglu_limit_list": None,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 256,
    "norm_topk_prob": True,
    "n_group": 4,
    "num_experts_per_tok": 3,
    "rope_theta": 6000000.0,
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    **dict.fromkeys(
        ("linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim", "layer_types", "rope_parameters")
    ),
    **dict.fromkeys(("mlp_layer_types", "model_max_length", "moe_renormalize", "num_expert_group", "qk_head_dim")),
    "num_experts_per_token": None,
}


def changed(folder: Path, **changes: Any) -> Path:
    """A config.json with these changes; ``None`` removes a key."""
    make_model("bailing-hybrid").config.save_pretrained(folder)
    path = folder / "config.json"
    values = json.loads(path.read_text()) | {"architectures": ["BailingHybridForCausalLM"]} | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    return path


def test_sizes(tmp_path: Path) -> None:
    config = read_hf_config(changed(tmp_path))
    assert config.states == LinearAttentionConfig(
        *(6, 6, 32, 32, 4), separate_projections=True, channel_decay=True, sigmoid_gate=True, decay_bound=-3.0
    )
    assert config.state_layers == (True, True, False, True, True, False, True)
    assert (config.unrotated_layers, config.interleaved_rope, config.rotary_dim) == (frozenset(), True, 8)
    assert [config.gate_size(layer) for layer in (2, 5)] == [6, 6]
    assert (config.dense_layers, config.num_experts, config.experts_per_token) == ({0, 1}, 8, 3)
    assert (config.router.num_groups, config.router.top_groups) == (4, 2)
    assert read_hf_config(changed(tmp_path, **PUBLISHED)) == config
    rope = {"rope_type": "default", "rope_theta": 6000000.0, "partial_rotary_factor": 0.5}
    assert read_hf_config(changed(tmp_path, **PUBLISHED | {"rope_parameters": rope})) == config


def test_defaults_and_decays_without_a_bound(tmp_path: Path) -> None:
    left_out = dict.fromkeys(("layer_types", "layer_group_size", "kda_lower_bound"))
    config = read_hf_config(changed(tmp_path, **left_out))
    assert config.state_layers == (True, True, True, True, True, False, True)
    assert isinstance(config.states, LinearAttentionConfig)
    assert config.states.decay_bound == -5.0
    plain = read_hf_config(changed(tmp_path, kda_safe_gate=False)).states
    assert isinstance(plain, LinearAttentionConfig)
    assert plain.decay_bound == 0.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_head_dim": 24}, "linear_key_head_dim must be a multiple of 16 up to 256, got 24"),
        ({"short_conv_kernel_size": 5}, "linear_conv_kernel_dim must be from 2 to 4, or 7, got 5"),
        ({"layer_group_size": 0}, "layer_group_size"),
        ({"layer_types": None, "layer_group_size": 1}, "layer_types: expected at least one linear_attention, got none"),
        ({"layer_types": None, "layer_group_size": 8}, "layer_types: expected at least one full_attention, got none"),
        ({"kda_lower_bound": 0.5}, "kda_lower_bound"),
        ({"kda_safe_gate": "yes"}, "kda_safe_gate"),
        ({"attention_bias": True}, "attention_bias must be False, got True"),
        ({"no_kda_lora": False}, "no_kda_lora must be True, got False"),
        (
            {"gated_attention_proj_granularity_type": "element_wise"},
            "gated_attention_proj_granularity_type must be 'head_wise', got 'element_wise'",
        ),
        ({"expert_swiglu_limit_list": [0.0, -1.0]}, "expert_swiglu_limit_list: expected numbers from 0, got [0.0, -1."),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(FastinferError) as error:
        read_hf_config(changed(tmp_path, **changes))
    assert message in str(error.value)
    assert "\n" not in str(error.value)
