"""Configurations as published before version 5 of transformers, whose keys lie elsewhere."""

import json
from pathlib import Path
from typing import Any

import pytest

from fastinfer.errors import CheckpointFormatError, UnsupportedModelError
from fastinfer.models.config import ModelConfig, RouterConfig
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


def test_windows_of_families_without(tmp_path: Path) -> None:
    """The key has no meaning in their files, as in transformers."""
    for name in ("LlamaForCausalLM", "GraniteForCausalLM", "CohereForCausalLM", "Qwen3VLForConditionalGeneration"):
        assert read(tmp_path, name, sliding_window=4096).windows == ()
    for name in ("Ministral3ForCausalLM", "Phi3ForCausalLM"):
        rope = {"rope_parameters": {"rope_type": "default"}}
        assert read(tmp_path, name, sliding_window=4096, **rope).windows == (4096,) * 8


def test_attention_to_later_tokens_is_refused(tmp_path: Path) -> None:
    gemma = {"head_dim": 64, "num_key_value_heads": 4}
    for name in ("Gemma2ForCausalLM", "Gemma3ForCausalLM"):
        read(tmp_path, name, use_bidirectional_attention=None, **gemma)
        with pytest.raises(UnsupportedModelError, match="use_bidirectional_attention must be False, got True"):
            read(tmp_path, name, use_bidirectional_attention=True, **gemma)


def test_layers_that_are_rotated_if_none_has_a_window(tmp_path: Path) -> None:
    full = {"layer_types": ["full_attention"] * 8}
    every = frozenset(range(8))
    for window in (4096, None):
        cohere2 = read(tmp_path, "Cohere2ForCausalLM", sliding_window=window, **full)
        exaone4 = read(tmp_path, "Exaone4ForCausalLM", sliding_window=window, **full)
        assert cohere2.unrotated_layers == every
        assert exaone4.unrotated_layers == (every if window else frozenset())


def test_an_activation_that_is_null(tmp_path: Path) -> None:
    config = read(tmp_path, "Gemma2ForCausalLM", hidden_activation=None, hidden_act="gelu_pytorch_tanh")
    assert config.activation == "gelu_tanh"


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
    assert (three.attention_softcap, three.activation, three.qk_norm) == (0.0, "gelu_tanh", "head")


def test_the_text_part_of_a_model_with_images(tmp_path: Path) -> None:
    """The first files of Gemma 3 leave out what equals the defaults."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 7,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    path = tmp_path / "config.json"
    architectures = ["Gemma3ForConditionalGeneration"]
    path.write_text(json.dumps({"architectures": architectures, "text_config": text, "vision_config": {"a": 1}}))
    config = read_hf_config(path)
    assert (config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim) == (2560, 8, 4, 256)
    assert (config.vocab_size, config.max_position) == (262208, 131072)
    assert config.windows == (1024, 1024, 1024, 1024, 1024, 0, 1024)
    assert (config.rope_theta, config.local_rope_theta, config.rope_scaling.factor) == (1e6, 1e4, 8.0)
    assert (config.attention_scale, config.activation) == (1 / 16, "gelu_tanh")
    path.write_text(json.dumps({"architectures": architectures, "text_config": {**text, "hidden_size": "wide"}}))
    with pytest.raises(CheckpointFormatError, match=r"text_config\.hidden_size: expected int, got 'wide'"):
        read_hf_config(path)


def test_positions_of_images_are_those_of_text(tmp_path: Path) -> None:
    scaling = {"type": "mrope", "mrope_section": [16, 24, 24]}
    config = read(tmp_path, "Qwen2_5_VLForConditionalGeneration", rope_scaling=scaling, rope_theta=1e6)
    assert (config.rope_scaling.kind, config.rope_theta, config.qkv_bias) == ("none", 1e6, True)


def test_queries_that_grow_with_their_position(tmp_path: Path) -> None:
    parameters = {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 16384,
    }
    config = read(tmp_path, "Mistral3ForConditionalGeneration", rope_parameters=parameters)
    assert (config.max_position, config.rope_scaling.attention_factor) == (131072, 1.0)
    assert (config.query_growth, config.query_length) == (0.0, 1)
    for kind in ("yarn", "default"):
        grown = {**parameters, "llama_4_scaling_beta": 0.1, "rope_type": kind}
        config = read(tmp_path, "Ministral3ForCausalLM", rope_parameters=grown)
        assert (config.max_position, config.query_growth, config.query_length) == (131072, 0.1, 16384)
        assert read(tmp_path, "LlamaForCausalLM", rope_parameters=grown).query_growth == 0.0


def test_olmo3(tmp_path: Path) -> None:
    """Its windows have the frequencies of training, whatever the other layers have."""
    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
    options = {"sliding_window": 4096, "rope_theta": 5e5, "rope_scaling": scaling}
    config = read(tmp_path, "Olmo3ForCausalLM", **options)
    assert config.windows == (4096, 4096, 4096, 0) * 2
    assert (config.rope_theta, config.rope_scaling.kind, config.local_rope_theta) == (5e5, "yarn", 5e5)
    assert (config.pre_norms, config.post_norms, config.qk_norm) == (False, True, "all")


def test_settings_for_each_kind_of_layer(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 8192}
    for local in ({}, {"sliding_attention": None}):
        config = read(tmp_path, "Olmo3ForCausalLM", rope_parameters={"full_attention": yarn, **local})
        assert (config.rope_theta, config.rope_scaling.kind, config.local_rope_theta) == (5e5, "yarn", 5e5)
    with pytest.raises(CheckpointFormatError, match=r"rope_parameters\.full_attention is missing"):
        read(tmp_path, "Olmo3ForCausalLM", rope_parameters={"sliding_attention": {"rope_theta": 1e4}})
    with pytest.raises(UnsupportedModelError, match="rope_type must be 'default', got 'yarn'"):
        read(tmp_path, "Olmo3ForCausalLM", rope_parameters={"full_attention": yarn, "sliding_attention": yarn})


def test_values_that_files_leave_out(tmp_path: Path) -> None:
    sizes = {key: value for key, value in SIZES.items() if key != "rms_norm_eps"}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Olmo3ForCausalLM"], **sizes}))
    olmo = read_hf_config(tmp_path / "config.json")
    assert (olmo.rope_theta, olmo.norm_eps, olmo.window(0), olmo.window(3)) == (5e5, 1e-5, 4096, 0)
    assert read(tmp_path, "Exaone4ForCausalLM", sliding_window=None).windows == ()
    assert read(tmp_path, "Exaone4ForCausalLM").windows == (4096, 4096, 4096, 0) * 2
    assert read(tmp_path, "SmolLM3ForCausalLM", sliding_window=64).windows == ()
    assert read(tmp_path, "SmolLM3ForCausalLM").rope_theta == 2e6
    assert read(tmp_path, "Qwen2VLForConditionalGeneration").rope_theta == 1e6


def test_layer_types_of_another_number_of_layers(tmp_path: Path) -> None:
    with pytest.raises(CheckpointFormatError, match="layer_types: expected 8 of sliding_attention and full_attention"):
        read(tmp_path, "MinistralForCausalLM", sliding_window=4096, layer_types=["sliding_attention"] * 7)


def test_heads_that_are_rotated_in_an_odd_part(tmp_path: Path) -> None:
    with pytest.raises(CheckpointFormatError, match="the rotated size must be even and positive, got 15"):
        read(tmp_path, "LlamaForCausalLM", partial_rotary_factor=15 / 64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale_attn_weights": False}, "scale_attn_weights must be True, got False"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx must be False, got True"),
        ({"add_cross_attention": True}, "add_cross_attention must be False, got True"),
        ({"n_head": 5}, "n_embd: expected a multiple of 5, got 64"),
    ],
)
def test_forms_of_gpt2_that_are_refused(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    sizes = {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 256}
    read(tmp_path, "GPT2LMHeadModel", **sizes)
    with pytest.raises((CheckpointFormatError, UnsupportedModelError), match=message):
        read(tmp_path, "GPT2LMHeadModel", **sizes | changes)


def test_another_language_model_within_mistrals(tmp_path: Path) -> None:
    text = {"model_type": "qwen3", **SIZES}
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text})
    )
    with pytest.raises(UnsupportedModelError, match="model_type must be mistral, ministral3 or mistral4, got 'qwen3'"):
        read_hf_config(tmp_path / "config.json")


def test_layers_that_do_not_know_positions(tmp_path: Path) -> None:
    assert read(tmp_path, "SmolLM3ForCausalLM").unrotated_layers == {3, 7}
    assert read(tmp_path, "SmolLM3ForCausalLM", no_rope_layer_interval=3).unrotated_layers == {2, 5}
    assert read(tmp_path, "SmolLM3ForCausalLM", no_rope_layers=[1, 0] * 4).unrotated_layers == {1, 3, 5, 7}
    with pytest.raises(CheckpointFormatError, match="no_rope_layers: expected 8 numbers 0 or 1, got"):
        read(tmp_path, "SmolLM3ForCausalLM", no_rope_layers=[1, 2] * 4)
    exaone = {"sliding_window": 4096, "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 2}
    assert read(tmp_path, "Exaone4ForCausalLM", **exaone).unrotated_layers == {3, 7}
    letters = {"sliding_window": 4096, "sliding_window_pattern": "LGL"}
    assert read(tmp_path, "Exaone4ForCausalLM", **letters).unrotated_layers == {1, 4, 7}
    assert read(tmp_path, "Exaone4ForCausalLM", **exaone | letters).unrotated_layers == {3, 7}
    for pattern in ("", "LLX"):
        with pytest.raises(CheckpointFormatError, match=r"sliding_window_pattern: expected letters L and G, got '"):
            read(tmp_path, "Exaone4ForCausalLM", sliding_window=4096, sliding_window_pattern=pattern)
    assert read(tmp_path, "Exaone4ForCausalLM", sliding_window=None).unrotated_layers == set()
    assert read(tmp_path, "Cohere2ForCausalLM", sliding_window=4096, logit_scale=0.25).unrotated_layers == {3, 7}
    with pytest.raises(UnsupportedModelError, match="use_qk_norm must be False, got True"):
        read(tmp_path, "CohereForCausalLM", use_qk_norm=True)


@pytest.mark.parametrize(
    ("architecture", "values", "message"),
    [
        ("GemmaForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention must be False"),
        ("ArceeForCausalLM", {"hidden_act": "silu"}, "hidden_act must be 'relu2', got 'silu'"),
        ("Starcoder2ForCausalLM", {"hidden_act": "silu"}, "hidden_act 'silu' is not implemented; supported are gelu_p"),
        ("Ernie4_5_MoeForCausalLM", {"moe_layer_end_index": 5}, "moe_layer_end_index must be -1 or 7, got 5"),
        ("Dots1ForCausalLM", {"scoring_func": "softmax"}, "scoring_func must be 'sigmoid', got 'softmax'"),
        ("StableLmForCausalLM", {"qk_layernorm": True}, "qk_layernorm must be False, got True"),
        ("StableLmForCausalLM", {"use_parallel_residual": True}, "use_parallel_residual must be False, got True"),
        ("OlmoeForCausalLM", {"clip_qkv": 8.0}, "clip_qkv must be null, got 8.0"),
        ("OlmoForCausalLM", {"clip_qkv": 8.0}, "clip_qkv must be null, got 8.0"),
        ("PhiForCausalLM", {"qk_layernorm": True}, "qk_layernorm must be False, got True"),
        ("PhiForCausalLM", {"tie_word_embeddings": True}, "tie_word_embeddings must be False, got True"),
        ("HunYuanMoEV1ForCausalLM", {"moe_topk": [1, 2]}, r"moe_topk must be the same for all layers, got \[1, 2\]"),
        ("HunYuanDenseV1ForCausalLM", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' is not"),
        ("LlamaForCausalLM", {"rope_scaling": {"type": "dynamic", "factor": 2.0, "alpha": 9.0}}, "'dynamic' is not"),
        (
            "Cohere2MoeForCausalLM",
            {"expert_selection_fn": "sparsemax"},
            "expert_selection_fn must be softmax or sigmoid, got 'sparsemax'",
        ),
        (
            "Cohere2MoeForCausalLM",
            {"shared_expert_combination_strategy": "max"},
            "shared_expert_combination_strategy must be average or sum, got 'max'",
        ),
        ("PhiMoEForCausalLM", {"num_experts_per_tok": 1}, "num_experts_per_tok must be 2, got 1"),
        (
            "PhiMoEForCausalLM",
            {"rope_scaling": {"type": "longrope", "short_mscale": 1.0, "long_mscale": 2.0}},
            "rope_scaling: long_mscale must be short_mscale, 1.0, got 2.0",
        ),
        (
            "ApertusForCausalLM",
            {"hidden_act": "silu", "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            "hidden_act must be 'xielu', got 'silu'",
        ),
    ],
)
def test_settings_that_are_not_implemented(
    tmp_path: Path, architecture: str, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read(tmp_path, architecture, **values)


def test_names_of_settings(tmp_path: Path) -> None:
    """Those of other families mean nothing, and some families have two for one setting."""
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    assert read(tmp_path, "Qwen2ForCausalLM", qkv_bias=False).qkv_bias
    assert not read(tmp_path, "Qwen2ForCausalLM", attention_bias=True).output_bias
    assert not read(tmp_path, "LlamaForCausalLM", qkv_bias=True, attention_out_bias=True).qkv_bias
    assert not read(tmp_path, "LlamaForCausalLM", attention_out_bias=True).output_bias
    for flag in (False, True):
        config = read(tmp_path, "Qwen2MoeForCausalLM", **experts, shared_expert_intermediate_size=32, qkv_bias=flag)
        assert (config.qkv_bias, config.output_bias) == (flag, False)
    config = read(tmp_path, "Ernie4_5_MoeForCausalLM", **experts)
    assert (config.num_experts, config.experts_per_token) == (8, 2)
    config = read(tmp_path, "Ernie4_5_MoeForCausalLM", moe_num_experts=16, moe_k=3, moe_intermediate_size=32)
    assert (config.num_experts, config.experts_per_token) == (16, 3)
    assert read(tmp_path, "Ernie4_5_ForCausalLM").architecture == "Ernie4_5ForCausalLM"
    dots = {**experts, "n_routed_experts": 8, "scoring_func": "noaux_tc"}  # as its files call sigmoids
    assert read(tmp_path, "Dots1ForCausalLM", **dots).router.scoring == "sigmoid"


def test_settings_that_mean_nothing(tmp_path: Path) -> None:
    """They are those of other families, which transformers ignores."""
    others = {"use_sliding_window": False, "layer_types": ["full_attention"] * 8, "sliding_window": 64}
    for name in ("MistralForCausalLM", "Mistral3ForConditionalGeneration", "Phi3ForCausalLM"):
        config = read(tmp_path, name, **others, attention_bias=True, mlp_bias=True)
        assert (config.windows, config.qkv_bias, config.output_bias, config.mlp_bias) == (
            (64,) * 8,
            False,
            False,
            False,
        )
    assert read(tmp_path, "Starcoder2ForCausalLM", **others).windows == (64,) * 8
    assert not any(read(tmp_path, "MinistralForCausalLM", **others).windows)
    phi = read(tmp_path, "PhiForCausalLM", attention_bias=False, mlp_bias=False)
    assert (phi.qkv_bias, phi.output_bias, phi.mlp_bias) == (True, True, True)
    neox = read(tmp_path, "GPTNeoXForCausalLM", rope_theta=500.0, partial_rotary_factor=1.0, num_key_value_heads=1)
    assert (neox.rope_theta, neox.rotary_dim * 4, neox.num_kv_heads) == (10000.0, neox.head_dim, neox.num_heads)
    neox = read(tmp_path, "GPTNeoXForCausalLM", rotary_emb_base=500.0, rotary_pct=1.0)
    assert (neox.rope_theta, neox.rotary_dim) == (500.0, neox.head_dim)
    hunyuan = {"num_experts": 8, "moe_topk": [2, 2], "moe_intermediate_size": [32, 32], "routed_scaling_factor": 3.0}
    config = read(tmp_path, "HunYuanMoEV1ForCausalLM", **hunyuan, norm_topk_prob=False)
    assert (config.experts_per_token, config.router) == (2, RouterConfig())
    assert config.shared_intermediate_size == config.intermediate_size != 32
    mellum = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "sliding_window": 64}
    mellum |= {"use_sliding_window": False, "mlp_only_layers": [0]}
    config = read(tmp_path, "MellumForCausalLM", **mellum, layer_types=["sliding_attention", "full_attention"] * 4)
    assert (config.windows, config.dense_layers, config.local_rope_theta) == ((64, 0) * 4, set(), 1e4)
    assert not any(read(tmp_path, "MellumForCausalLM", **mellum).windows)


def test_lfm3(tmp_path: Path) -> None:
    name = "Lfm3ForCausalLM"
    assert read(tmp_path, name, rms_norm_eps=0.5).norm_eps == 0.5
    nested = {
        "full_attention": {"rope_type": "proportional", "rope_theta": 5e5, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
    }
    for key in ("rope_parameters", "rope_scaling"):
        config = read(tmp_path, name, **{key: nested, "rope_theta": None})
        assert (config.rope_theta, config.local_rope_theta) == (5e5, 300.0)
        with pytest.raises(UnsupportedModelError, match=f"{key} must be for each kind of layer, got"):
            read(tmp_path, name, **{key: {"rope_type": "default", "rope_theta": 3.0}})
    with pytest.raises(UnsupportedModelError, match="rope_type must be 'default' for sliding_attention, got 'linear'"):
        read(tmp_path, name, rope_parameters=nested | {"sliding_attention": {"rope_type": "linear"}})
    with pytest.raises(UnsupportedModelError, match="attention_bias must be False, got True"):
        read(tmp_path, name, attention_bias=True)
    with pytest.raises(UnsupportedModelError, match="conv_L_cache"):
        read(tmp_path, name, conv_L_cache=5)
    with pytest.raises(CheckpointFormatError, match="expected 8 of conv and full_attention and sliding_attention"):
        read(tmp_path, name, layer_types=["conv"] * 7 + ["linear"])
    with pytest.raises(UnsupportedModelError, match="at least one full_attention or sliding_attention, got none"):
        read(tmp_path, name, layer_types=["conv"] * 8)


def test_a_trained_length_beside_settings_by_kind_of_layer(tmp_path: Path) -> None:
    """The length of the kind counts, as in transformers; without kinds, the one beside the settings."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    nested = {"full_attention": yarn, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    outer = {"original_max_position_embeddings": 100, "sliding_window": 8, "rope_theta": None}
    config = read(tmp_path, "Olmo3ForCausalLM", rope_parameters=nested, **outer)
    assert config.rope_scaling.original_max_position == 64
    config = read(tmp_path, "Olmo3ForCausalLM", rope_parameters=yarn, **outer)
    assert config.rope_scaling.original_max_position == 100


def test_gemmas_gelu_is_the_one_by_tanh(tmp_path: Path) -> None:
    assert read(tmp_path, "GemmaForCausalLM", hidden_act="gelu").activation == "gelu_tanh"
    assert read(tmp_path, "LlamaForCausalLM", hidden_act="gelu").activation == "gelu"


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
        read(tmp_path, "LlamaForCausalLM", rope_scaling=scaling, **settings)


def test_mixtures(tmp_path: Path) -> None:
    mixtral = read(tmp_path, "MixtralForCausalLM", num_local_experts=8, num_experts_per_tok=2)
    assert (mixtral.num_experts, mixtral.experts_per_token, mixtral.router.renormalize) == (8, 2, True)
    sizes = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": False}
    qwen = read(tmp_path, "Qwen3MoeForCausalLM", **sizes)
    assert (qwen.num_experts, qwen.intermediate_size, qwen.router.renormalize) == (128, 768, False)


def test_mixtures_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointFormatError, match="num_experts_per_tok: expected 1 to 8, got 9"):
        read(tmp_path, "MixtralForCausalLM", num_local_experts=8, num_experts_per_tok=9)
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 768, "norm_topk_prob": False}
    for name in ("Qwen3_5MoeForCausalLM", "Qwen3VLMoeForConditionalGeneration"):  # whose code always renormalises
        with pytest.raises(UnsupportedModelError, match="norm_topk_prob must be True, got False"):
            read(tmp_path, name, **sizes)


GLM = {"n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "first_k_dense_replace": 3}
MINIMAX = {"num_local_experts": 256, "num_experts_per_tok": 8, "head_dim": 128, "rotary_dim": 64}


def test_glm_4_5(tmp_path: Path) -> None:
    """A layer that predicts tokens after the next one is not loaded."""
    config = read(tmp_path, "Glm4MoeForCausalLM", **GLM, routed_scaling_factor=2.5, attention_bias=True)
    assert config.router == RouterConfig("sigmoid", has_bias=True, scale=2.5)
    assert (config.dense_layers, config.mlp_size(2), config.mlp_size(3)) == ({0, 1, 2}, 8192, 1408)
    assert (config.shared_intermediate_size, config.shared_expert_gate) == (1408, False)
    assert (config.rotary_dim, config.qkv_bias, config.output_bias, config.qk_norm) == (32, True, False, "none")
    assert read(tmp_path, "Glm4MoeForCausalLM", **GLM, use_qk_norm=True).qk_norm == "head"


def test_minimax_m2(tmp_path: Path) -> None:
    config = read(tmp_path, "MiniMaxM2ForCausalLM", **MINIMAX, use_qk_norm=True, scoring_func="sigmoid")
    assert config.router == RouterConfig("sigmoid", has_bias=True)
    assert (config.rotary_dim, config.qk_norm, config.dense_layers) == (64, "all", set())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("scoring_func", "softmax"),
        ("use_routing_bias", False),
        ("use_qk_norm", False),
        ("qk_norm_type", "per_head"),
        ("shared_intermediate_size", 512),
    ],
)
def test_other_forms_of_minimax_m2_are_refused(tmp_path: Path, key: str, value: object) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{key} must be .*, got {value!r}"):
        read(tmp_path, "MiniMaxM2ForCausalLM", **MINIMAX | {key: value})


def test_qwen_mixtures_without_biases(tmp_path: Path) -> None:
    mixture = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    assert read(tmp_path, "Qwen2MoeForCausalLM", **mixture).qkv_bias
    assert not read(tmp_path, "Qwen2MoeForCausalLM", qkv_bias=False, **mixture).qkv_bias


def test_qwen_layers_without_experts(tmp_path: Path) -> None:
    sizes = {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408}
    config = read(
        tmp_path,
        "Qwen2MoeForCausalLM",
        **sizes,
        shared_expert_intermediate_size=5632,
        decoder_sparse_step=2,
        mlp_only_layers=[1, 7],
    )
    assert config.dense_layers == {0, 1, 2, 4, 6, 7}
    assert (config.shared_intermediate_size, config.shared_expert_gate, config.qkv_bias) == (5632, True, True)
    assert config.router == RouterConfig(renormalize=False)


@pytest.mark.parametrize(
    ("architecture", "values", "width"),
    [
        ("Qwen3MoeForCausalLM", {"shared_expert_intermediate_size": 0}, 0),  # as in the largest Qwen3-Coder
        ("Qwen2MoeForCausalLM", {"shared_expert_intermediate_size": 48}, 48),
        ("Qwen3_5MoeForCausalLM", {"linear_num_value_heads": 16}, 512),
        ("Qwen3NextForCausalLM", {"shared_expert_intermediate_size": 64}, 64),
    ],
)
def test_width_of_the_shared_expert(tmp_path: Path, architecture: str, values: dict[str, Any], width: int) -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    assert read(tmp_path, architecture, **experts, **values).shared_intermediate_size == width


@pytest.mark.parametrize("name", [None, "silu", "swish", "sigmoid"])
def test_gate_of_linear_attention(tmp_path: Path, name: str | None) -> None:
    if name == "sigmoid":
        with pytest.raises(UnsupportedModelError, match="output_gate_type must be 'silu', got 'sigmoid'"):
            read(tmp_path, "Qwen3_5ForCausalLM", output_gate_type=name)
    else:
        usual = read(tmp_path, "Qwen3_5ForCausalLM")
        assert read(tmp_path, "Qwen3_5ForCausalLM", output_gate_type=name) == usual


def test_groups_of_experts(tmp_path: Path) -> None:
    config = read(tmp_path, "Glm4MoeForCausalLM", **GLM, n_group=8, topk_group=4)
    assert (config.router.num_groups, config.router.top_groups) == (8, 4)
    with pytest.raises(CheckpointFormatError, match="topk_group: expected 1 to 8, got 9"):
        read(tmp_path, "Glm4MoeForCausalLM", **GLM, n_group=8, topk_group=9)
