"""Model configuration from the metadata of a GGUF file.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from fastinfer.errors import GGUFFormatError, UnsupportedModelError
from fastinfer.formats.gguf import GGUFFile
from fastinfer.models.config import MAX_LAYERS, MAX_SIZE, ModelConfig
from fastinfer.models.gguf_architectures import ARCHITECTURES
from fastinfer.models.gguf_experts import router, shared_intermediate_size
from fastinfer.models.gguf_fields import head_sizes, same_size, windows_by_layer, with_swiglu_clamps
from fastinfer.models.gguf_gemma4 import gemma4_config, gemma4_sizes
from fastinfer.models.gguf_granite_swa import granite_swa_config
from fastinfer.models.gguf_indexer import indexer_config
from fastinfer.models.gguf_laguna import laguna_config
from fastinfer.models.gguf_latent import latent_attention, latent_scale
from fastinfer.models.gguf_llama4 import llama4_config
from fastinfer.models.gguf_mimo import mimo_config, mimo_sizes
from fastinfer.models.gguf_muse import muse_glimmer_config
from fastinfer.models.gguf_rope import query_growth, rope_scaling
from fastinfer.models.gguf_states import state_layers, state_sizes
from fastinfer.models.gguf_step import step_config
from fastinfer.models.structure import NEMOTRON_H, periodic_windows


def read_gguf_config(file: GGUFFile) -> ModelConfig:
    """Read the model configuration from the metadata.

    Raises:
        UnsupportedModelError: the architecture or its rotary scaling is not implemented.
        GGUFFormatError: a key is missing, or its value is out of range.
    """
    architecture = file.get("general.architecture", str)
    if architecture == "clip":
        raise UnsupportedModelError(
            f"{file.path}: expected a model, got an image encoder, which goes with one as mmproj"
        )
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{file.path}: architecture {architecture!r} is not implemented; supported are {', '.join(ARCHITECTURES)}"
        )
    family = ARCHITECTURES[architecture]
    structure = family.structure
    by_layer = {"gemma4": gemma4_sizes, "mimo2": mimo_sizes, "step35": head_sizes, "laguna": head_sizes}
    sizes = by_layer.get(architecture)
    known = {} if sizes is None else sizes(file)

    def size(key: str, default: int | None = None) -> int:
        if key in known:
            return known[key]
        name = f"{architecture}.{key}"
        if isinstance(file.metadata.get(name), np.ndarray):
            return same_size(file, architecture, key)
        if default is None:
            return file.get(name, int, minimum=1, maximum=MAX_SIZE)
        # A file may write 0 where another leaves out the key, as those of Phi-4 do for the window.
        return file.get(name, int, default, minimum=min(default, 1), maximum=MAX_SIZE)

    def number(key: str, default: float, minimum: float = 0.0) -> float:
        return file.get(f"{architecture}.{key}", float, default, minimum=minimum)

    hidden_size, num_heads = size("embedding_length"), size("attention.head_count")
    # The last layers may predict tokens after the next one; they are not loaded.
    num_blocks = file.get(f"{architecture}.block_count", int, minimum=1, maximum=MAX_LAYERS)
    num_blocks -= file.get(f"{architecture}.nextn_predict_layers", int, 0, minimum=0)
    if num_blocks < 1:
        raise GGUFFormatError(
            f"{file.path}: expected at least one layer besides nextn_predict_layers, got {num_blocks}"
        )
    with_states = state_layers(file, architecture, num_blocks)
    known |= with_states.sizes
    num_layers = len(with_states.stored) or num_blocks
    num_kv_heads = size("attention.head_count_kv", num_heads)
    head_dim = size("attention.key_length", max(1, hidden_size // num_heads))
    if num_heads % num_kv_heads:
        raise GGUFFormatError(f"{file.path}: expected a multiple of {num_kv_heads} query heads, got {num_heads}")
    has_norms = "blk.0.attn_q_norm.weight" in file.tensors and structure.qk_norm == "none"
    if has_norms and architecture == "glm4moe":
        structure = replace(structure, qk_norm="head")
    elif has_norms:
        raise UnsupportedModelError(f"{file.path}: norms of queries (blk.0.attn_q_norm) are not implemented for it")
    if architecture in ("glm4", "bailingmoe3") and f"{architecture}.rope.dimension_sections" in file.metadata:
        # Of a model that reads images, in whose file the halves of rotated pairs are apart.
        structure = replace(structure, interleaved_rope=False)
    latent = latent_attention(file, architecture) if structure.latent_attention else None
    if latent is not None:
        num_kv_heads, head_dim = 1, latent.row_dim
    if architecture == "gptneox":
        structure = replace(structure, parallel=file.get("gptneox.use_parallel_residual", bool, True))
    if architecture == "phimoe":
        structure = replace(structure, lm_head_bias="output.bias" in file.tensors)
    if architecture == "cohere2moe" and "cohere2moe.attention.layer_norm_rms_epsilon" in file.metadata:
        structure = replace(structure, norm="rms_norm")
    if clamp := file.get(f"{architecture}.attention.clamp_kqv", float, 0.0):
        raise UnsupportedModelError(f"{file.path}: {architecture}.attention.clamp_kqv must be 0, got {clamp}")
    rotary_dim = 0 if family.learned_positions else size("rope.dimension_count", head_dim)
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise GGUFFormatError(f"{file.path}: rotary size must be even and at most {head_dim}, got {rotary_dim}")
    # Phi-3.5-MoE has a LayerNorm and Nemotron-H has none, but their files may name the epsilon the other way.
    epsilon = "layer_norm_epsilon"
    if architecture == "phimoe" or (
        structure.norm != "layer_norm"
        and (structure is not NEMOTRON_H or f"{architecture}.attention.{epsilon}" not in file.metadata)
    ):
        epsilon = "layer_norm_rms_epsilon"
    num_experts = size("expert_count", 0)
    dense = _dense_layers(file, architecture, num_layers) if num_experts else frozenset()
    # The second names are those of Ollama's files of Gemma 3.
    rope_theta = number("rope.freq_base", number("rope.global.freq_base", 10000.0, minimum=1.001), minimum=1.001)
    window = size("attention.sliding_window", family.window)
    windows = periodic_windows(window, structure.window_period, num_layers) if window else ()
    if windows and isinstance(file.metadata.get(f"{architecture}.attention.sliding_window_pattern"), np.ndarray):
        windows = windows_by_layer(file, architecture)[:num_layers]
    local_rope_theta = None
    if structure.only_full_scaled and windows:
        local_rope_theta = number("rope.freq_base_swa", rope_theta, minimum=1.001)
    elif family.local_rope_theta is not None:
        usual = number("rope.local.freq_base", family.local_rope_theta, minimum=1.001)
        local_rope_theta = number("rope.freq_base_swa", usual, minimum=1.001)
    period = family.no_rope_period
    unrotated_layers = frozenset(layer for layer in range(num_layers) if period and (layer + 1) % period == 0)
    # The key says whether anything is rotated.
    is_rotated = file.get(f"{architecture}.rope.scaling.finetuned", bool, True) and structure is not NEMOTRON_H
    if structure.mamba2 and not is_rotated:
        unrotated_layers = frozenset(range(num_layers))
    growth, growth_length = query_growth(file, architecture, size("context_length"))
    config = ModelConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        intermediate_size=size("expert_feed_forward_length", 0) or size("feed_forward_length"),
        dense_intermediate_size=size("feed_forward_length") if dense else 0,
        shared_intermediate_size=shared_intermediate_size(file, architecture),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        vocab_size=_vocab_size(file),
        max_position=size("context_length"),
        norm_eps=file.get(f"{architecture}.attention.{epsilon}", float, minimum=0.0, maximum=1.0),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling(file, architecture, size("context_length"), rotary_dim // 2),
        local_rope_theta=local_rope_theta,
        windows=windows,
        state_layers=with_states.flags,
        states=state_sizes(file, architecture, hidden_size) if with_states.flags else None,
        stored_layers=with_states.stored,
        latent_attention=latent,
        query_growth=growth,
        query_length=growth_length,
        unrotated_layers=unrotated_layers | structure.unrotated_layers(windows),
        activation=family.activation,
        gated=family.gated,
        qkv_bias=family.qkv_bias or _has_biases(file, "attn_q") or _has_biases(file, "attn_qkv"),
        output_bias=family.other_biases or _has_biases(file, "attn_output"),
        mlp_bias=family.other_biases or _has_biases(file, "ffn_down"),
        attention_scale=_attention_scale(architecture, hidden_size, num_layers, num_heads)
        if latent is None
        else latent_scale(file, architecture, latent),
        attention_softcap=number("attn_logit_softcapping", 0.0),
        logits_softcap=number("final_logit_softcapping", 0.0),
        logits_scale=number("logit_scale", 1.0, minimum=1e-6),
        num_experts=num_experts,
        experts_per_token=file.get(f"{architecture}.expert_used_count", int, minimum=1, maximum=num_experts)
        if num_experts
        else 0,
        expert_latent_size=size("moe_latent_size", 0) if num_experts else 0,
        router=router(file, architecture),
        dense_layers=dense,
        shared_expert_gate=family.shared_expert_gate,
        **structure.config_fields(hidden_size),
    )
    config = replace(config, **_factors(file, config))
    if architecture == "cohere2moe":  # whose dense layers are rotated without a window, too
        scale = 0.5 if config.shared_intermediate_size else 1.0
        unrotated = config.unrotated_layers - config.dense_layers
        return replace(config, experts_scale=scale, unrotated_layers=unrotated)
    steps = {
        "bailingmoe3": with_swiglu_clamps,
        "gemma4": gemma4_config,
        "granite_swa": granite_swa_config,
        "laguna": laguna_config,
        "llama4": llama4_config,
        "mimo2": mimo_config,
        "muse-glimmer": muse_glimmer_config,
        "step35": step_config,
        **dict.fromkeys(("glm-dsa", "deepseek32"), indexer_config),
    }
    finish = steps.get(architecture)
    return config if finish is None else finish(file, config)


def _dense_layers(file: GGUFFile, architecture: str, num_layers: int) -> frozenset[int]:
    """Return the layers of a model with experts that have none."""
    if ARCHITECTURES[architecture].counts_dense:
        count = file.get(f"{architecture}.leading_dense_block_count", int, 0, minimum=0, maximum=MAX_LAYERS)
        return frozenset(range(count))
    return frozenset(layer for layer in range(num_layers) if f"blk.{layer}.ffn_gate_inp.weight" not in file.tensors)


def _has_biases(file: GGUFFile, part: str) -> bool:
    """Return whether this matrix of the layers has a bias, which no key of the metadata says."""
    return any(name.startswith("blk.") and name.endswith(f".{part}.bias") for name in file.tensors)


def _factors(file: GGUFFile, config: ModelConfig) -> dict[str, Any]:
    """Return the factors of Granite and of MiniCPM3, as fields of the configuration."""
    architecture = config.architecture
    if architecture == "minicpm3":  # whose files do not say them
        scales = {"embedding_scale": 12.0, "residual_scale": 1.4 / config.num_layers**0.5}
        return {**scales, "logits_scale": 256 / config.hidden_size}
    if not architecture.startswith("granite"):
        return {}

    def factor(key: str, default: float | None = 1.0) -> float | None:
        return file.get(f"{architecture}.{key}", float, default, minimum=1e-6, maximum=1e6)

    key = f"{architecture}.rope.scaling.finetuned"
    if not file.get(key, bool, True) and architecture != "granitehybrid":
        raise UnsupportedModelError(f"{file.path}: {key}: models without rotary positions are not implemented")
    return {
        "embedding_scale": factor("embedding_scale"),
        "residual_scale": factor("residual_scale"),
        "attention_scale": factor("attention.scale", None),
        "logits_scale": 1.0 / (factor("logit_scale") or 1.0),
    }


def _vocab_size(file: GGUFFile) -> int:
    tensor = file.tensors.get("token_embd.weight")
    architecture = file.get("general.architecture", str)
    if tensor is None and architecture == "dflash":
        return len(file.get("tokenizer.ggml.tokens", list))
    if tensor is None and architecture == "eagle3":
        return file.get("eagle3.vocab_size", int, minimum=1, maximum=MAX_SIZE)
    if tensor is None:
        raise GGUFFormatError(f"{file.path}: tensor 'token_embd.weight' is missing")
    return tensor.shape[0]


def _attention_scale(architecture: str, hidden_size: int, num_layers: int, num_heads: int) -> float | None:
    """Return the attention scale of Gemma 2 and 3 with 27 billion parameters; None for the default."""
    wide = (architecture, num_layers) in (("gemma2", 46), ("gemma3", 62))
    return (hidden_size / num_heads) ** -0.5 if wide else None
