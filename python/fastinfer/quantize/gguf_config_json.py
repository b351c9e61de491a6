"""``config.json`` of the model in a GGUF file, as transformers writes it for the same model."""

import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from fastinfer.errors import CheckpointFormatError, UnsupportedModelError
from fastinfer.formats.json_fields import JsonFields
from fastinfer.models.config import ModelConfig
from fastinfer.models.families import FAMILIES
from fastinfer.models.gguf_checkpoint import GGUFCheckpoint
from fastinfer.models.hf_config import parse_hf_config
from fastinfer.models.state_config import LinearAttentionConfig, ShortConvConfig
from fastinfer.ops import RopeScaling

# Names of transformers by the architecture of the GGUF file: the class of the model, and model_type.
NAMES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "mistral3": ("Ministral3ForCausalLM", "ministral3"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen2moe": ("Qwen2MoeForCausalLM", "qwen2_moe"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "smollm3": ("SmolLM3ForCausalLM", "smollm3"),
    "apertus": ("ApertusForCausalLM", "apertus"),
    "arcee": ("ArceeForCausalLM", "arcee"),
    "seed_oss": ("SeedOssForCausalLM", "seed_oss"),
    "ernie4_5": ("Ernie4_5ForCausalLM", "ernie4_5"),
    "glm4": ("Glm4ForCausalLM", "glm4"),
    "starcoder2": ("Starcoder2ForCausalLM", "starcoder2"),
    "stablelm": ("StableLmForCausalLM", "stablelm"),
    "hunyuan-dense": ("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense"),
    "hunyuan-moe": ("HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe"),
    "nemotron": ("NemotronForCausalLM", "nemotron"),
    "jais2": ("Jais2ForCausalLM", "jais2"),
    "phi2": ("PhiForCausalLM", "phi"),
    "gemma": ("GemmaForCausalLM", "gemma"),
    "olmoe": ("OlmoeForCausalLM", "olmoe"),
    "gemma2": ("Gemma2ForCausalLM", "gemma2"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
    "exaone4": ("Exaone4ForCausalLM", "exaone4"),
    "command-r": ("CohereForCausalLM", "cohere"),
    "cohere2": ("Cohere2ForCausalLM", "cohere2"),
    "phi3": ("Phi3ForCausalLM", "phi3"),
    "granite": ("GraniteForCausalLM", "granite"),
    "olmo2": ("Olmo2ForCausalLM", "olmo2"),
    "lfm2": ("Lfm2ForCausalLM", "lfm2"),
    "qwen35": ("Qwen3_5ForCausalLM", "qwen3_5_text"),
}
# Llama's architecture with experts, and OLMo 2's with windows.
MIXTRAL = ("MixtralForCausalLM", "mixtral")
OLMO3 = ("Olmo3ForCausalLM", "olmo3")


def config_json(checkpoint: GGUFCheckpoint, dtype: str) -> tuple[dict[str, Any], ModelConfig]:
    """Return the fields of config.json, and the configuration that is read from them.

    Args:
        checkpoint: the open GGUF file.
        dtype: name of the dtype of the matrices.

    Raises:
        UnsupportedModelError: the fields for this architecture are not known, or do not say all that the file says.
    """
    config = checkpoint.config
    names = NAMES.get(config.architecture)
    if names is None:
        raise UnsupportedModelError(
            f"{checkpoint.path}: a GGUF file of {config.architecture} cannot be quantised; known are {', '.join(NAMES)}"
        )
    if config.architecture == "llama" and config.num_experts:
        names = MIXTRAL
    elif config.architecture == "olmo2" and config.windows:
        names = OLMO3
    architecture, model_type = names
    if "rope_factors" in checkpoint and config.rope_scaling.kind == "none":
        factors = checkpoint.vector("rope_factors", config.rotary_dim // 2)
        config = replace(config, rope_scaling=_scaling_by_factors(factors, config.max_position))
    if isinstance(config.states, LinearAttentionConfig):  # whose heads get the order of transformers
        config = replace(config, states=replace(config.states, tiled_output=False))
    config = replace(config, architecture=architecture)
    values = {
        "architectures": [architecture],
        "model_type": model_type,
        "dtype": dtype,
        "tie_word_embeddings": "lm_head" not in checkpoint,
        **_sizes(config),
        **_positions(config),
        **_factors(config),
        **_experts(config),
        **_states(config),
    }
    for name in ("bos", "eos"):
        if (token := checkpoint.file.get(f"tokenizer.ggml.{name}_token_id", int, None)) is not None:
            values[f"{name}_token_id"] = token
    parsed = _parse(values, checkpoint.path)
    if lost := [field.name for field in fields(config) if not _same(config, parsed, field.name)]:
        raise UnsupportedModelError(
            f"{checkpoint.path}: it cannot be quantised, because {architecture}'s config.json cannot say its "
            f"{', '.join(lost)}"
        )
    return values, parsed


def _sizes(config: ModelConfig) -> dict[str, Any]:
    family = FAMILIES[config.architecture]
    epsilon = family.epsilon or ("layer_norm_eps" if config.norm == "layer_norm" else "rms_norm_eps")
    activation = "gelu_pytorch_tanh" if config.activation == "gelu_tanh" else config.activation
    values: dict[str, Any] = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        epsilon: config.norm_eps,
        "hidden_activation" if config.architecture.startswith("Gemma") else "hidden_act": activation,
    }
    if config.mlp_bias != family.defaults.get("mlp_bias", False):
        values["mlp_bias"] = config.mlp_bias
    if not family.qkv_bias:
        values[family.aliases.get("attention_bias", "attention_bias")] = config.qkv_bias
    return values


def _positions(config: ModelConfig) -> dict[str, Any]:
    defaults = FAMILIES[config.architecture].defaults
    values: dict[str, Any] = {"max_position_embeddings": config.max_position, "rope_theta": config.rope_theta}
    share = config.rotary_dim / config.head_dim
    if share != defaults.get("partial_rotary_factor", 1.0):
        values["partial_rotary_factor"] = share
    if config.rope_scaling.kind != "none":
        values["rope_scaling"] = _rope_scaling(config.rope_scaling)
    elif config.architecture == "ApertusForCausalLM":
        values["rope_scaling"] = {"rope_type": "default"}  # transformers takes another one otherwise
    if config.query_growth:
        growth = {"llama_4_scaling_beta": config.query_growth, "original_max_position_embeddings": config.query_length}
        values["rope_scaling"] = {**values.get("rope_scaling", {"rope_type": "default"}), **growth}
    if config.rope_scaling.kind == "longrope":
        values["original_max_position_embeddings"] = config.rope_scaling.original_max_position
    if config.local_rope_theta is not None:
        values["rope_local_base_freq"] = config.local_rope_theta
    if config.windows:
        kinds = ["sliding_attention" if window else "full_attention" for window in config.windows]
        values |= {"sliding_window": max(config.windows), "layer_types": kinds}
    elif "sliding_window" in defaults:
        values["sliding_window"] = None
    if "use_sliding_window" in defaults:
        values["use_sliding_window"] = bool(config.windows)
    if config.architecture == "SmolLM3ForCausalLM":
        values["no_rope_layers"] = [int(layer not in config.unrotated_layers) for layer in range(config.num_layers)]
    return values


def _rope_scaling(scaling: RopeScaling) -> dict[str, Any]:
    values: dict[str, Any] = {
        "rope_type": scaling.kind,
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_max_position,
        "attention_factor": scaling.attention_factor,
    }
    if scaling.kind == "longrope":
        values |= {"short_factor": list(scaling.short_factors), "long_factor": list(scaling.long_factors)}
    elif scaling.kind == "yarn":
        values |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow, "truncate": scaling.truncate}
    return {name: value for name, value in values.items() if value}


def _scaling_by_factors(factors: Tensor, max_position: int) -> RopeScaling:
    """Return a scaling that divides each frequency by its factor.

    A GGUF file has the factors that follow from Llama 3's settings, and not the settings.
    """
    divisors = tuple(factors.tolist())
    return RopeScaling(
        kind="longrope",
        original_max_position=max_position,
        attention_factor=1.0,
        short_factors=divisors,
        long_factors=divisors,
    )


def _factors(config: ModelConfig) -> dict[str, Any]:
    name = config.architecture
    scale = config.attention_scale or config.head_dim**-0.5
    if name == "GraniteForCausalLM":
        return {
            "embedding_multiplier": config.embedding_scale,
            "residual_multiplier": config.residual_scale,
            "attention_multiplier": scale,
            "logits_scaling": 1.0 / config.logits_scale,
        }
    if name.startswith("Cohere"):
        return {"logit_scale": config.logits_scale}
    if name.startswith("Gemma"):
        return {
            "query_pre_attn_scalar": scale**-2,
            "attn_logit_softcapping": config.attention_softcap or None,
            "final_logit_softcapping": config.logits_softcap or None,
        }
    return {}


def _experts(config: ModelConfig) -> dict[str, Any]:
    if not config.num_experts:
        return {}
    values: dict[str, Any] = {"num_experts_per_tok": config.experts_per_token}
    if config.architecture == MIXTRAL[0]:
        return values | {"num_local_experts": config.num_experts}
    if config.shared_intermediate_size:
        values["shared_expert_intermediate_size"] = config.shared_intermediate_size
    return values | {
        "num_experts": config.num_experts,
        "moe_intermediate_size": config.intermediate_size,
        "norm_topk_prob": config.router.renormalize,
    }


def _states(config: ModelConfig) -> dict[str, Any]:
    states = config.states
    if states is None:
        return {}
    kind = "linear_attention" if isinstance(states, LinearAttentionConfig) else "conv"
    kinds = {"layer_types": [kind if has_state else "full_attention" for has_state in config.state_layers]}
    if isinstance(states, ShortConvConfig):
        return kinds | {"conv_L_cache": states.kernel_size, "conv_bias": False, "block_auto_adjust_ff_dim": False}
    assert isinstance(states, LinearAttentionConfig)
    return kinds | {
        "linear_num_key_heads": states.num_key_heads,
        "linear_num_value_heads": states.num_value_heads,
        "linear_key_head_dim": states.key_dim,
        "linear_value_head_dim": states.value_dim,
        "linear_conv_kernel_dim": states.kernel_size,
    }


def _parse(values: dict[str, Any], path: Path) -> ModelConfig:
    try:
        return parse_hf_config(JsonFields(path, dict(values), CheckpointFormatError))
    except CheckpointFormatError as error:
        raise UnsupportedModelError(f"{path}: it cannot be quantised: {error}") from None


def _same(config: ModelConfig, parsed: ModelConfig, name: str) -> bool:
    """Return whether an attribute is the same in both configurations, up to the rounding of a quotient."""
    first, second = getattr(config, name), getattr(parsed, name)
    if name == "router" and not config.num_experts:
        return True
    if name == "attention_scale":
        first, second = (scale or config.head_dim**-0.5 for scale in (first, second))
    if isinstance(first, float) and isinstance(second, float):
        return math.isclose(first, second, rel_tol=1e-12)
    return bool(first == second)
