"""Configurations as published before version 5 of transformers, whose keys lie elsewhere."""

import json
from pathlib import Path
from typing import Any

import pytest

from fastinfer.errors import CheckpointFormatError
from fastinfer.models.config import ModelConfig
from fastinfer.models.hf_config import read_hf_config

SIZES = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 8,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": 1000,
    "max_position_embeddings": 131072,
}


def read(folder: Path, architecture: str, **values: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture], **SIZES, **values}))
    return read_hf_config(folder / "config.json")


def test_llama3(tmp_path: Path) -> None:
    scaling = {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }
    config = read(tmp_path, "LlamaForCausalLM", rope_theta=500000.0, rope_scaling=scaling, tie_word_embeddings=True)
    assert (config.rope_theta, config.rope_scaling.kind, config.rope_scaling.factor) == (500000.0, "llama3", 32.0)
    assert config.rope_scaling.original_max_position == 8192
    assert (config.head_dim, config.rotary_dim, config.windows) == (64, 64, ())


def test_scaling_by_its_old_name(tmp_path: Path) -> None:
    config = read(tmp_path, "LlamaForCausalLM", rope_scaling={"type": "linear", "factor": 4})
    assert (config.rope_scaling.kind, config.rope_scaling.factor) == ("linear", 4.0)


def test_windows_that_are_switched_off(tmp_path: Path) -> None:
    off = {"sliding_window": 32768, "use_sliding_window": False, "max_window_layers": 2}
    assert read(tmp_path, "Qwen2ForCausalLM", **off).windows == ()
    assert read(tmp_path, "Qwen2ForCausalLM", **off | {"use_sliding_window": True}).windows == (0, 0, *[32768] * 6)
    assert read(tmp_path, "MistralForCausalLM", sliding_window=None).windows == ()
    assert read(tmp_path, "MistralForCausalLM", sliding_window=4096).windows == (4096,) * 8


def test_gemma(tmp_path: Path) -> None:
    common = {"head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256}
    two = read(
        tmp_path,
        "Gemma2ForCausalLM",
        **common,
        sliding_window=4096,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
    )
    assert two.windows == (4096, 0) * 4
    assert (two.attention_softcap, two.logits_softcap, two.attention_scale) == (50.0, 30.0, 1 / 16)
    assert two.embedding_scale == pytest.approx(2048**0.5)
    three = read(
        tmp_path,
        "Gemma3ForCausalLM",
        **common,
        sliding_window=512,
        sliding_window_pattern=6,
        rope_theta=1000000.0,
        rope_local_base_freq=10000.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        attn_logit_softcapping=None,
    )
    assert three.windows == (512, 512, 512, 512, 512, 0, 512, 512)
    assert (three.rope_theta, three.local_rope_theta, three.rope_scaling.factor) == (1e6, 1e4, 8.0)
    assert (three.attention_softcap, three.activation, three.qk_norm) == (0.0, "gelu_tanh", True)


def test_longrope(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 32, "long_factor": [2.0] * 32}
    config = read(
        tmp_path,
        "Phi3ForCausalLM",
        rope_scaling={"type": "longrope", **factors},
        original_max_position_embeddings=4096,
    )
    assert (config.rope_scaling.kind, config.rope_scaling.factor) == ("longrope", 32.0)
    assert config.rope_scaling.original_max_position == 4096


@pytest.mark.parametrize("place", ["config", "scaling", "default"])
def test_longrope_of_a_trained_length_of_1(tmp_path: Path, place: str) -> None:
    scaling: dict[str, Any] = {"type": "longrope", "short_factor": [1.0] * 32, "long_factor": [2.0] * 32}
    length = {"original_max_position_embeddings": 1}
    settings: dict[str, Any] = {"config": length, "default": {"max_position_embeddings": 1}}.get(place, {})
    if place == "scaling":
        scaling |= length
    with pytest.raises(CheckpointFormatError, match="original_max_position_embeddings: expected at least 2, got 1"):
        read(tmp_path, "Phi3ForCausalLM", rope_scaling=scaling, **settings)


def test_mixtures(tmp_path: Path) -> None:
    mixtral = read(tmp_path, "MixtralForCausalLM", num_local_experts=8, num_experts_per_tok=2)
    assert (mixtral.num_experts, mixtral.experts_per_token, mixtral.renormalize_experts) == (8, 2, True)
    sizes = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": False}
    qwen = read(tmp_path, "Qwen3MoeForCausalLM", **sizes)
    assert (qwen.num_experts, qwen.intermediate_size, qwen.renormalize_experts) == (128, 768, False)
