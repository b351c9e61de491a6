"""Small random models of every supported family, made by transformers."""

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from fastinfer.models.config import Precision
from fastinfer.models.decoder import Decoder
from fastinfer.models.hf_checkpoint import HFCheckpoint
from fastinfer.models.loader import load_decoder

TOKENS = 150  # past every window, and past the length that the scaled ones were trained on

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
HEADS = {"head_dim": 32}  # not hidden_size / num_attention_heads
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + i / 8 for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
    "original_max_position_embeddings": 64,
}
GPT_OSS = {
    "num_hidden_layers": 5,
    "hidden_size": 96,
    "intermediate_size": 80,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": 16,
    "rope_parameters": {**YARN, "rope_theta": 150000.0, "truncate": False, "beta_fast": 24.0, "beta_slow": 2.0},
}
LINEAR = {
    "head_dim": 32,
    "num_hidden_layers": 8,
    "initializer_range": 0.06,  # more, and the normalised keys amplify rounding errors from layer to layer
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 48,
    "tie_word_embeddings": True,
}
# Other layers with linear attention, and biases of the others.
FEW = {
    "num_hidden_layers": 5,
    "layer_types": [f"{kind}_attention" for kind in ("full", "linear", "full", "full", "linear")],
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 3,
    "linear_conv_kernel_dim": 3,
    "attention_bias": True,
    "tie_word_embeddings": False,
}
OLMO_HYBRID = {
    "num_hidden_layers": 6,
    "layer_types": [f"{kind}_attention" for kind in ("linear", "linear", "full", "linear", "full", "linear")],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 48,
}
LLAMA4 = {
    "head_dim": 32,
    "num_hidden_layers": 5,
    "intermediate_size_mlp": 80,
    "num_local_experts": 6,
    "num_experts_per_tok": 1,
    "no_rope_layer_interval": 3,
    "attention_chunk_size": 40,
    "rope_parameters": LLAMA3,
}
LFM2 = {
    "num_hidden_layers": 6,
    "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention", "conv"],
    "block_multiple_of": 32,
}
LFM3 = {"head_dim": 32, "num_hidden_layers": 9, "sliding_window": 16}
MIXTURE = {"num_local_experts": 4, "num_experts_per_tok": 2}

EXPERTS = {"moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 3}
SHARED = EXPERTS | {"shared_expert_intermediate_size": 80}
GROUPS = {
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 2,
    "routed_scaling_factor": 1.5,
}

LATENT = {
    "hidden_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "moe_intermediate_size": 48,
    "q_lora_rank": 56,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
}
KIMI = {key: value for key, value in LATENT.items() if key != "q_lora_rank"} | {
    "num_hidden_layers": 9,
    "initializer_range": 0.06,
    "linear_head_dim": 32,
    "linear_num_heads": 5,
    "num_local_experts": 7,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 1.5,
}
MSCALE = {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}
BAILING = {key: value for key, value in LATENT.items() if key != "q_lora_rank"} | {
    "num_hidden_layers": 7,
    "initializer_range": 0.06,
    "head_dim": 32,
    "layer_group_size": 3,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "kda_lower_bound": -3.0,
}
GROWTH = {"llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 40}
GROWING = {**MSCALE, **GROWTH}
MINICPM3_ROPE = {**LONGROPE, "short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2.0, 4.0, 5.0, 6.0]}

# Far fewer tokens than the text has, and so many heads that no token has the score 0, at which choices may differ.
INDEXER = {"index_topk": 12, "index_n_heads": 24, "index_head_dim": 20}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("Llama", {"num_key_value_heads": 4}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "mistral": ("Mistral", {"sliding_window": 16, **HEADS}),
    "ministral3": ("Ministral3", HEADS | {"rope_parameters": {**GROWING, "mscale": 1.0}}),
    "ministral3-plain": (
        "Ministral3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, **GROWTH}, "num_hidden_layers": 3},
    ),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}),
    "qwen3": ("Qwen3", HEADS),
    "gemma2": (
        "Gemma2",
        HEADS
        | {"sliding_window": 16, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 5.0}
        | {"final_logit_softcapping": 3.0},
    ),
    "gemma3": ("Gemma3Text", HEADS | {"sliding_window": 16, "query_pre_attn_scalar": 20, "num_hidden_layers": 7}),
    "qwen2-plain": ("Qwen2", {}),
    # As GGUF files can say it: with the head's own width as scale.
    "gemma2-plain": ("Gemma2", HEADS | {"sliding_window": 16, "query_pre_attn_scalar": 32, "num_hidden_layers": 3}),
    "gemma3-plain": ("Gemma3Text", HEADS | {"sliding_window": 16, "query_pre_attn_scalar": 32, "num_hidden_layers": 7}),
    "phi3": ("Phi3", {"sliding_window": 40}),
    "phi3-longrope": ("Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}),
    "gpt2": ("GPT2", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256, "vocab_size": 320}),
    "mixtral": ("Mixtral", MIXTURE),
    "phimoe": (
        "Phimoe",
        HEADS
        | {"num_local_experts": 8, "router_jitter_noise": 0.25, "attention_bias": True, "lm_head_bias": True}
        | {"sliding_window": 16},
    ),
    # As GGUF files can say it: with the tolerance of the published model.
    "phimoe-published": (
        "Phimoe",
        HEADS | {"num_local_experts": 8, "attention_bias": True, "lm_head_bias": True, "sliding_window": 16},
    ),
    "phimoe-plain": ("Phimoe", {"num_local_experts": 5, "tie_word_embeddings": True}),
    "llama-yarn-untruncated": ("Llama", {"rope_parameters": {**YARN, "truncate": False}}),
    "llama-yarn-mscale": ("Llama", {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}}),
    "smollm3": ("SmolLM3", {"tie_word_embeddings": True}),
    "smollm3-other-layers": ("SmolLM3", {"no_rope_layers": [0, 1, 1, 0], "attention_bias": True}),
    "ministral": ("Ministral", {"sliding_window": 16, **HEADS}),
    "cwm": ("Cwm", {"num_hidden_layers": 5, "sliding_window": 16, **HEADS}),
    "seed-oss": ("SeedOss", HEADS | {"mlp_bias": True}),
    "seed-oss-plain": ("SeedOss", HEADS),
    "seed-oss-biases": ("SeedOss", HEADS | {"attention_bias": False, "attention_out_bias": True}),
    "apertus": ("Apertus", {"head_dim": 32, "rope_parameters": LLAMA3, "attention_bias": True}),
    # As GGUF files can say it.
    "apertus-plain": ("Apertus", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    "arcee": ("Arcee", {"rope_parameters": YARN}),
    "arcee-plain": ("Arcee", HEADS),
    "arcee-biases": ("Arcee", HEADS | {"attention_bias": True, "mlp_bias": True}),
    "ernie4.5": ("Ernie4_5", HEADS),
    "ernie4.5-biases": ("Ernie4_5", HEADS | {"use_bias": True, "tie_word_embeddings": False}),
    "ernie4.5-moe": (
        "Ernie4_5_Moe",
        HEADS | {"moe_intermediate_size": 48, "moe_num_experts": 8, "moe_k": 3, "tie_word_embeddings": False},
    ),
    "glm": ("Glm", HEADS),
    "glm-plain": ("Glm", {"head_dim": 16}),
    "glm4": ("Glm4", HEADS | {"attention_bias": False}),
    "glm4-biases": ("Glm4", HEADS),
    "starcoder2": ("Starcoder2", {"sliding_window": 16}),
    "starcoder2-full": ("Starcoder2", {}),
    "starcoder2-plain": ("Starcoder2", {"use_bias": False}),
    "stablelm": ("StableLm", {"use_qkv_bias": True, "partial_rotary_factor": 0.5}),
    "stablelm-plain": ("StableLm", {}),
    "gemma": ("Gemma", HEADS | {"hidden_act": "gelu"}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", {"num_hidden_layers": 5, "sliding_window": 16, "rope_scaling": {**YARN, "rope_theta": 5e5}}),
    "exaone4": ("Exaone4", {"num_hidden_layers": 5, "sliding_window": 16, "sliding_window_pattern": 4, **HEADS}),
    "exaone4-full": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    "cohere": ("Cohere", {"logit_scale": 0.25}),
    "cohere2": ("Cohere2", {"num_hidden_layers": 5, "sliding_window": 16, **HEADS}),
    "qwen3-moe": ("Qwen3Moe", HEADS | {"moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 3}),
    "qwen3-moe-renormalized": (
        "Qwen3Moe",
        HEADS | {"moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True},
    ),
    "gpt-oss": ("GptOss", HEADS | GPT_OSS),
    "olmoe": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 3}),
    "dots1-full": ("Dots1", HEADS | EXPERTS | GROUPS | {"n_shared_experts": 1, "norm_topk_prob": True}),
    "dots1": (
        "Dots1",
        HEADS
        | EXPERTS
        | GROUPS
        | {"n_shared_experts": 2, "norm_topk_prob": True, "sliding_window": 16, "max_window_layers": 2},
    ),
    "solar-open": ("SolarOpen", HEADS | EXPERTS | {"n_routed_experts": 8, "attention_bias": True}),
    "qwen2-moe": ("Qwen2Moe", SHARED | {"decoder_sparse_step": 2, "mlp_only_layers": [3]}),
    "qwen2-moe-plain": ("Qwen2Moe", SHARED),
    "qwen3-moe-some-dense": ("Qwen3Moe", HEADS | EXPERTS | {"mlp_only_layers": [0, 2]}),
    "glm4-moe": ("Glm4Moe", HEADS | EXPERTS | {"attention_bias": True, "use_qk_norm": True} | GROUPS),
    "glm4-moe-plain": (
        "Glm4Moe",
        HEADS | EXPERTS | {"n_routed_experts": 8, "n_shared_experts": 2, "norm_topk_prob": False},
    ),
    "minimax-m2": ("MiniMaxM2", HEADS | MIXTURE | {"partial_rotary_factor": 0.5, "num_local_experts": 9}),
    "deepseek-v2": ("DeepseekV2", LATENT | GROUPS | {"num_experts_per_tok": 3, "q_lora_rank": None}),
    "deepseek-v2-queries": (
        "DeepseekV2",
        LATENT | GROUPS | {"num_experts_per_tok": 3, "n_group": 1, "topk_group": 1, "rope_parameters": MSCALE},
    ),
    "deepseek-v3": ("DeepseekV3", LATENT | GROUPS | {"num_experts_per_tok": 3, "rope_parameters": MSCALE}),
    "deepseek-v3.2": (
        "DeepseekV32",
        LATENT | GROUPS | INDEXER | {"num_experts_per_tok": 3, "rope_parameters": MSCALE, "first_k_dense_replace": 2},
    ),
    "glm-dsa": (
        "GlmMoeDsa",
        LATENT
        | INDEXER
        | {"n_routed_experts": 8, "num_experts_per_tok": 3, "v_head_dim": 40, "first_k_dense_replace": 2}
        | {"num_hidden_layers": 5, "indexer_types": ["full", "full", "shared", "shared", "full"]},
    ),
    "mistral4": ("Mistral4", LATENT | GROUPS | {"num_experts_per_tok": 3, "rope_parameters": GROWING}),
    # As GGUF files can say it: with equal factors.
    "deepseek-v3-mscale": (
        "DeepseekV3",
        LATENT | GROUPS | {"num_experts_per_tok": 3, "rope_parameters": {**YARN, "mscale": 1.3, "mscale_all_dim": 1.3}},
    ),
    "mistral4-mscale": (
        "Mistral4",
        LATENT
        | GROUPS
        | {"num_experts_per_tok": 3, "rope_parameters": {**GROWING, "mscale": 1.3, "mscale_all_dim": 1.3}},
    ),
    "deepseek-v3-plain": (
        "DeepseekV3",
        LATENT | GROUPS | {"num_experts_per_tok": 3, "q_lora_rank": None, "rope_interleave": False},
    ),
    "glm4-moe-lite": (
        "Glm4MoeLite",
        LATENT | {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 1, "topk_group": 1, "v_head_dim": 40},
    ),
    "youtu": ("Youtu", LATENT | {"rope_interleave": False}),
    "youtu-plain": ("Youtu", LATENT | {"q_lora_rank": None, "tie_word_embeddings": False}),
    "minicpm3": (
        "MiniCPM3",
        LATENT
        | {"v_head_dim": None, "rope_parameters": MINICPM3_ROPE, "mlp_bias": True}
        | {"scale_emb": 3, "scale_depth": 0.7, "dim_model_base": 150, "original_max_position_embeddings": 64},
    ),
    # As GGUF files can say it: with the factors of the published model, and trained on the whole length.
    "minicpm3-plain": (
        "MiniCPM3",
        LATENT
        | {
            "v_head_dim": 16,
            "q_lora_rank": 56,
            "rope_parameters": {**MINICPM3_ROPE, "original_max_position_embeddings": 256},
        },
    ),
    "axk1": ("AXK1", LATENT | GROUPS | {"num_experts_per_tok": 3, "rope_parameters": MSCALE}),
    "qwen3.5-moe": ("Qwen3_5Moe", LINEAR | SHARED | {"num_hidden_layers": 5, "tie_word_embeddings": False}),
    "qwen3-next": ("Qwen3Next", LINEAR | SHARED | {"decoder_sparse_step": 3, "mlp_only_layers": [5]}),
    "qwen3-next-plain": ("Qwen3Next", LINEAR | SHARED | {"num_hidden_layers": 4, "linear_num_key_heads": 3}),
    "lfm2": ("Lfm2", LFM2),
    "lfm2-biases": ("Lfm2", LFM2 | {"conv_bias": True, "conv_L_cache": 7, "block_auto_adjust_ff_dim": False}),
    "lfm2-moe": ("Lfm2Moe", LFM2 | EXPERTS | {"num_dense_layers": 2}),
    "lfm2-moe-no-bias": ("Lfm2Moe", LFM2 | EXPERTS | {"num_dense_layers": 0, "use_expert_bias": False}),
    "lfm3": ("Lfm3", LFM3),
    "lfm3-plain": (
        "Lfm3",
        LFM3
        | {"conv_bias": True, "conv_L_cache": 3, "use_sandwich_norm": False, "use_attention_gate": False}
        | {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3, "tie_word_embeddings": False},
    ),
    "olmo-hybrid": ("OlmoHybrid", OLMO_HYBRID | {"rope_parameters": {"rope_theta": None, "rope_type": "default"}}),
    "olmo-hybrid-plain": (
        "OlmoHybrid",
        OLMO_HYBRID | {"linear_allow_neg_eigval": False, "linear_conv_kernel_dim": 3, "attention_bias": True},
    ),
    "kimi-linear": ("KimiLinear", KIMI),
    "kimi-linear-groups": (
        "KimiLinear",
        KIMI
        | {"q_lora_rank": 56, "num_hidden_layers": 5, "linear_conv_kernel_dim": 3, "n_group": 4, "topk_group": 2}
        | {"layer_types": [f"{kind}_attention" for kind in ("full", "linear", "linear", "full", "linear")]}
        | {"mlp_layer_types": ["sparse", "dense", "sparse", "dense", "sparse"], "norm_topk_prob": False}
        | {"num_local_experts": 8, "n_shared_experts": 2},
    ),
    "llama4": ("Llama4", LLAMA4 | {"floor_scale": 30, "attn_scale": 0.3, "interleave_moe_layer_step": 2}),
    "llama4-plain": (
        "Llama4",
        LLAMA4
        | {"use_qk_norm": False, "attn_temperature_tuning": False, "moe_layers": [0, 2, 3], "attention_bias": True}
        | {"attention_chunk_size": 64},
    ),
    "qwen3.5": ("Qwen3_5", LINEAR),
    "qwen3.5-few": ("Qwen3_5", LINEAR | FEW),
}
# What files name otherwise than dots.llm1.
AFMOE_NAMES = {"num_dense_layers": 1, "num_shared_experts": 2, "route_scale": 1.5}
FAMILIES |= {
    "afmoe": (
        "Afmoe",
        HEADS | EXPERTS | AFMOE_NAMES | {"num_hidden_layers": 6, "sliding_window": 16, "mup_enabled": True},
    ),
    "afmoe-full": (
        "Afmoe",
        HEADS
        | EXPERTS
        | {"num_dense_layers": 2, "num_hidden_layers": 3, "global_attn_every_n_layers": 1, "tie_word_embeddings": True},
    ),
    "exaone-moe": (
        "ExaoneMoe",
        HEADS
        | EXPERTS
        | {"num_hidden_layers": 6, "sliding_window": 16, "n_group": 4, "topk_group": 2, "num_shared_experts": 2},
    ),
    "exaone-moe-full": (
        "ExaoneMoe",
        EXPERTS
        | {"layer_types": ["full_attention"] * 4, "norm_topk_prob": False, "tie_word_embeddings": True}
        | {"mlp_layer_types": ["sparse", "dense", "sparse", "dense"]},
    ),
    "exaone-moe-other": (
        "ExaoneMoe",
        EXPERTS
        | {"sliding_window": 16, "norm_topk_prob": False, "tie_word_embeddings": True, "first_k_dense_replace": 2}
        | {"layer_types": [f"{kind}_attention" for kind in ("full", "sliding", "sliding", "full")]},
    ),
}
FAMILIES |= {
    "hy-v3": (
        "HYV3",
        HEADS | EXPERTS | {"num_shared_experts": 2, "attention_bias": True, "rope_parameters": YARN},
    ),
    "hy-v3-some-dense": (
        "HYV3",
        HEADS | EXPERTS | {"mlp_layer_types": ["sparse", "dense", "dense", "sparse"], "tie_word_embeddings": True},
    ),
    "flex-olmo": ("FlexOlmo", {"num_experts": 6, "num_experts_per_tok": 3, "attention_bias": True}),
    "flex-olmo-renormalized": ("FlexOlmo", {"num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True}),
}
# A quarter and half of a head are rotated.
MIMO_ROPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
}
MIMO = {"head_dim": 32, "v_head_dim": 24, "n_routed_experts": 8, "num_hidden_layers": 7, "sliding_window": 16}
FAMILIES |= {
    "mimo-v2-flash": ("MiMoV2Flash", EXPERTS | MIMO | {"n_group": 4, "topk_group": 2}),
    "mimo-v2-flash-other": (
        "MiMoV2Flash",
        EXPERTS
        | MIMO
        | {"attention_bias": True, "attention_value_scale": None, "rope_parameters": MIMO_ROPE}
        | {"num_key_value_heads": 1, "num_hidden_layers": 4, "tie_word_embeddings": True}
        | {"layer_types": [f"{kind}_attention" for kind in ("sliding", "full", "full", "sliding")]}
        | {"mlp_layer_types": ["sparse", "dense", "sparse", "dense"]},
    ),
    # As GGUF files can say it: with one share of heads that is rotated.
    "mimo-v2-flash-biases": (
        "MiMoV2Flash",
        EXPERTS
        | MIMO
        | {"attention_bias": True, "attention_value_scale": None, "num_hidden_layers": 3}
        | {"mlp_layer_types": ["sparse", "sparse", "dense"]},
    ),
    "mimo-v2-flash-equal": ("MiMoV2Flash", EXPERTS | MIMO | {"v_head_dim": 32, "attention_value_scale": 0.5}),
}
GRANITE = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.125,
    "logits_scaling": 8.0,
}
GRANITE_HYBRID = GRANITE | {
    "num_hidden_layers": 6,
    "layer_types": [f"{kind}_attention" for kind in ("linear", "linear", "full", "linear", "full", "linear")],
    "shared_intermediate_size": 80,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 48,
    "mamba_n_groups": 2,
}
FAMILIES |= {
    "granite": ("Granite", GRANITE | {"tie_word_embeddings": True, "attention_bias": True}),
    "granite-plain": ("Granite", GRANITE | {"num_hidden_layers": 3, "logits_scaling": 6.0}),
    "hyperclovax": ("HyperCLOVAX", GRANITE | HEADS | {"attention_multiplier": None}),
    "hyperclovax-plain": ("HyperCLOVAX", GRANITE | {"use_post_norm": False}),
    "granite-moe": ("GraniteMoe", GRANITE | MIXTURE | {"tie_word_embeddings": True}),
    "granite-moe-shared": ("GraniteMoeShared", GRANITE | MIXTURE | {"shared_intermediate_size": 80}),
    "granite-hybrid": ("GraniteMoeHybrid", GRANITE_HYBRID | MIXTURE),
    "granite-hybrid-dense": (
        "GraniteMoeHybrid",
        GRANITE_HYBRID | {"num_local_experts": 0, "mamba_n_groups": 1, "tie_word_embeddings": True},
    ),
    "granite-hybrid-biases": (
        "GraniteMoeHybrid",
        GRANITE_HYBRID
        | {"num_local_experts": 0, "mamba_proj_bias": True, "mamba_conv_bias": False, "attention_bias": True}
        | {"time_step_limit": [0.5, 1.5], "mamba_d_conv": 3, "position_embedding_type": "rope"},
    ),
    "granite-hybrid-attention": (
        "GraniteMoeHybrid",
        GRANITE_HYBRID
        | MIXTURE
        | {"layer_types": ["full_attention"] * 5, "num_hidden_layers": 5, "position_embedding_type": "rope"},
    ),
    "granite-hybrid-attention-dense": (
        "GraniteMoeHybrid",
        GRANITE_HYBRID
        | {"layer_types": ["full_attention"] * 5, "num_hidden_layers": 5, "position_embedding_type": "rope"}
        | {"num_local_experts": 0, "tie_word_embeddings": True},
    ),
    "granite-swa": (
        "GraniteSWA",
        GRANITE
        | {"num_hidden_layers": 5, "sliding_window": 16, "layer_rope_theta": [500.0, 100.0, 0, 100.0, 500.0]}
        | {"attention_multiplier": 0.5},
    ),
    "granite-moe-swa": ("GraniteMoeSWA", GRANITE | MIXTURE | {"shared_intermediate_size": 48, "sliding_window": 16}),
}
COHERE2_MOE = HEADS | {"num_hidden_layers": 6, "sliding_window": 16, "logit_scale": 1.0}
ALPHA = {"rope_type": "dynamic", "factor": 1.0, "alpha": 50.0}
HUNYUAN_MOE = HEADS | {"num_experts": 8, "moe_topk": [3, 3, 3, 3]}
FAMILIES |= {
    "hunyuan": ("HunYuanDenseV1", HEADS | {"rope_parameters": ALPHA}),
    "hunyuan-biases": ("HunYuanDenseV1", HEADS | {"attention_bias": True, "rope_parameters": YARN}),
    "hunyuan-moe": ("HunYuanMoEV1", HUNYUAN_MOE | {"rope_parameters": ALPHA}),
    "nemotron": ("Nemotron", {"attention_bias": True, "mlp_bias": True}),
    "nemotron-plain": ("Nemotron", {"tie_word_embeddings": True, "rope_parameters": {"partial_rotary_factor": 0.25}}),
    "jais2": ("Jais2", HEADS),
    "jais2-plain": ("Jais2", {"attention_bias": False, "mlp_bias": False}),
    "helium": ("Helium", {"head_dim": 16, "tie_word_embeddings": True}),
    "helium-biases": ("Helium", {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    "nanochat": ("NanoChat", {}),
    "nanochat-yarn": ("NanoChat", {"rope_parameters": YARN, "attention_bias": True, "final_logit_softcapping": None}),
    "olmo": ("Olmo", {}),
    "olmo-biases": ("Olmo", {"attention_bias": True, "tie_word_embeddings": True}),
    "phi": ("Phi", {}),
    "gpt-neox": ("GPTNeoX", {"rotary_pct": 0.5}),
    "gpt-neox-fast": ("GPTNeoX", {"hidden_act": "gelu_fast"}),
    "gpt-neox-sequential": ("GPTNeoX", {"attention_bias": False, "use_parallel_residual": False}),
    "vaultgemma": (
        "VaultGemma",
        HEADS | {"sliding_window": 16, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 5.0},
    ),
    "mellum": (
        "Mellum",
        HEADS
        | EXPERTS
        | {
            "sliding_window": 16,
            "layer_types": [f"{kind}_attention" for kind in ("sliding", "full", "sliding", "full")],
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "rope_parameters": {
                "full_attention": {**YARN, "rope_theta": 500.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "mellum-full": ("Mellum", HEADS | EXPERTS),
    # As GGUF files can say it: with experts in all layers.
    "mellum-plain": (
        "Mellum",
        HEADS
        | EXPERTS
        | {"sliding_window": 16, "layer_types": ["full_attention", "sliding_attention"] * 2}
        | {"rope_parameters": {"full_attention": YARN, "sliding_attention": {**YARN, "rope_type": "default"}}},
    ),
    # The dense layer is rotated without a window.
    "cohere2-moe": (
        "Cohere2Moe",
        COHERE2_MOE
        | {"first_k_dense_replace": 1, "num_experts_per_tok": 3, "expert_selection_fn": "sigmoid"}
        | {"prefix_dense_intermediate_size": 160, "num_shared_experts": 2},
    ),
    "cohere2-moe-rms": (
        "Cohere2Moe",
        COHERE2_MOE
        | {"first_k_dense_replace": 3, "prefix_dense_sliding_window_pattern": 2, "sliding_window_pattern": 2}
        | {"num_shared_experts": 1, "shared_expert_combination_strategy": "sum"}
        | {"rms_norm_eps": 1e-5, "attention_bias": True},
    ),
    "cohere2-moe-plain": (
        "Cohere2Moe",
        COHERE2_MOE | {"expert_selection_fn": "sigmoid", "norm_topk_prob": False},
    ),
}


def _gemma4(kinds: str, **changes: Any) -> tuple[str, dict[str, Any]]:
    """Gemma 4 with layers of these kinds, sliding or full, and no inputs by layer unless it has some."""
    types = {"s": "sliding_attention", "f": "full_attention"}
    return "Gemma4Text", {
        "num_hidden_layers": len(kinds),
        "layer_types": [types[kind] for kind in kinds],
        "head_dim": 32,
        "global_head_dim": 48,
        "sliding_window": 16,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 320,
        **changes,
    }


# 31B; E2B and E4B; 26B.
FAMILIES |= {
    "gemma4": _gemma4("ssfssf", attention_k_eq_v=True, num_global_key_value_heads=1, final_logit_softcapping=3.0),
    "gemma4-inputs": _gemma4(
        "sfsfssf", hidden_size_per_layer_input=24, num_kv_shared_layers=3, use_double_wide_mlp=True
    ),
    "gemma4-unified": (
        "Gemma4UnifiedText",
        {key: value for key, value in _gemma4("ssf")[1].items() if "per_layer" not in key}
        | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
    # For groups of 32.
    "gemma4-wide": _gemma4(
        "sfsf",
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        global_head_dim=64,
        hidden_size_per_layer_input=32,
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
    ),
    "gemma4-moe": _gemma4(
        "ssfsf",
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        enable_moe_block=True,
        num_experts=8,
        top_k_experts=3,
        moe_intermediate_size=48,
    ),
    "gemma4-other": _gemma4(
        "sfsf",
        hidden_size_per_layer_input=16,
        attention_bias=True,
        num_kv_shared_layers=1,
        global_head_dim=32,
        rope_parameters={
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 1e5,
                "partial_rotary_factor": 0.7,
                "factor": 2.0,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
}


def make_model(family: str, seed: int = 0, **more: Any) -> Any:
    """A model in fp32; weights that start as ones or zeros are random, too, or a mistake with them would not show."""
    name, changes = FAMILIES[family]
    sizes = {} if name == "GPT2" else SIZES
    text = "Text" if name.startswith(("Qwen3_5", "Llama4", "Step3p7")) else ""
    config = getattr(transformers, f"{name}{text}Config")(**(sizes | changes | more))
    kind = {
        "GPT2": "GPT2LMHeadModel",
        "Step3p7": "Step3p7ForConditionalGeneration",  # which has no class for text alone
    }.get(name, f"{name.removesuffix('Text')}ForCausalLM")
    if name == "Step3p7":
        config = transformers.Step3p7Config(text_config=config, vision_config=STEP_VISION)
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = getattr(transformers, kind)(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() > 1 and not parameter.any():
                parameter.normal_(std=config.get_text_config().initializer_range)
            if parameter.dim() == 1 or parameter_name.endswith("_bias"):
                parameter.add_(torch.randn_like(parameter) / 5)
            if name.startswith("Gemma4") and parameter_name.endswith("q_norm.weight"):
                parameter.mul_(0.2)  # in place of 1 / sqrt(head_dim), or attention amplifies rounding errors
            elif name == "GPT2" and "h." in parameter_name:
                parameter.mul_(5)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("layer_scalar"):
                buffer.fill_(0.3 + torch.rand(1).item())
            if buffer_name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.add_(torch.randn_like(buffer) / 5)
    return model


def save_model(folder: Path, family: str, sizes: dict[str, Any] | None = None, **options: Any) -> Any:
    """Write it as a folder of safetensors, with other sizes if given; returns the model."""
    model = make_model(family, **(sizes or {}))
    model.save_pretrained(folder, **options)
    return model


def load(folder: Path, dtype: str = "float32") -> Decoder:
    return load_decoder(HFCheckpoint(folder), Precision.of(dtype), None)


def some_tokens() -> list[int]:
    return torch.randint(3, 320, (TOKENS,), generator=torch.Generator().manual_seed(5)).tolist()


def expected(model: object, ids: list[int]) -> Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].float().log_softmax(-1)  # type: ignore[operator]


NEMOTRON_H = {
    "num_hidden_layers": None,
    "layers_block_type": [
        {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}[kind] for kind in "M-ME*EMM-*-M"
    ],
    "head_dim": 32,
    "mamba_num_heads": 6,
    "mamba_head_dim": 32,
    "ssm_state_size": 48,
    "n_groups": 2,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 80,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 2,
    "routed_scaling_factor": 1.5,
    "time_step_min": 0.5,
}
FAMILIES |= {
    "nemotron-h": ("NemotronH", NEMOTRON_H),
    "nemotron-h-latent": ("NemotronH", NEMOTRON_H | {"moe_latent_size": 40}),
    "nemotron-h-dense": (
        "NemotronH",
        NEMOTRON_H
        | {"use_bias": True, "use_conv_bias": False, "n_groups": 3}
        | {"layers_block_type": [kind.replace("moe", "mlp") for kind in NEMOTRON_H["layers_block_type"]]},
    ),
    # As GGUF files can say it: with MLPs or experts alone, and with no least time step that matters.
    "nemotron-h-plain": (
        "NemotronH",
        NEMOTRON_H
        | {"time_step_min": 1e-6}
        | {"layers_block_type": [kind.replace("moe", "mlp") for kind in NEMOTRON_H["layers_block_type"]]},
    ),
    "nemotron-h-moe": (
        "NemotronH",
        NEMOTRON_H
        | {"time_step_min": 1e-6}
        | {"layers_block_type": [kind.replace("mlp", "moe") for kind in NEMOTRON_H["layers_block_type"]]},
    ),
    "nemotron-h-moe-latent": (
        "NemotronH",
        NEMOTRON_H
        | {"time_step_min": 1e-6, "moe_latent_size": 24}
        | {"layers_block_type": [kind.replace("mlp", "moe") for kind in NEMOTRON_H["layers_block_type"]]},
    ),
}

FALCON_H1 = {
    "num_hidden_layers": 3,
    "mamba_d_ssm": 96,  # not a multiple of the hidden size
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_d_state": 48,
    "mamba_n_groups": 2,
    "mamba_norm_before_gate": False,
    "head_dim": 32,
    "embedding_multiplier": 3.7,
    "lm_head_multiplier": 0.3,
    "key_multiplier": 0.6,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.7,
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.24,
    "ssm_multipliers": [0.8, 0.7, 1.4, 0.5, 0.35],
    "mlp_multipliers": [0.9, 0.55],
}
FAMILIES |= {
    "falcon-h1": ("FalconH1", FALCON_H1),
    "falcon-h1-norm": (
        "FalconH1",
        FALCON_H1 | {"mamba_rms_norm": True, "mamba_conv_bias": False, "mamba_d_conv": 3},
    ),
    "falcon-h1-plain": (
        "FalconH1",
        {key: value for key, value in FALCON_H1.items() if "multiplier" not in key}
        | {"tie_word_embeddings": True, "time_step_limit": [0.5, 1.5]}
        | {"mamba_d_ssm": None, "mamba_n_heads": 4, "mamba_d_head": "auto"},
    ),
}

_STEP_KINDS = [f"{kind}_attention" for kind in ("full", "sliding", "sliding", "full", "sliding", "sliding")]
_STEP_ROPE = {
    "full_attention": {**LLAMA3, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 1.0},
}
STEP = {
    "num_hidden_layers": 6,
    "layer_types": _STEP_KINDS,
    "sliding_window": 16,
    "num_sliding_attention_heads": 6,
    "mlp_layer_types": ["dense", "sparse", "sparse", "dense", "sparse", "sparse"],
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "share_expert_dim": 80,
    "moe_router_scaling_factor": 1.7,
    "swiglu_limits": [0.0, 0.0, 0.2, 0.3, 0.05, None],
    "swiglu_limits_shared": [0.1, 0.0, 0.0, 0.0, 0.3, 0.15],
    "rope_parameters": _STEP_ROPE,
}
STEP_VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
}
LAGUNA = {
    "num_hidden_layers": 6,
    "layer_types": _STEP_KINDS,
    "sliding_window": 16,
    "num_attention_heads_per_layer": [4, 6, 8, 4, 10, 6],
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 80,
    "moe_routed_scaling_factor": 1.6,
    "rope_parameters": {
        **_STEP_ROPE,
        "full_attention": {**YARN, "rope_theta": 500.0, "partial_rotary_factor": 0.5, "attention_factor": 1.1},
    },
}
FAMILIES |= {
    "step3.7": ("Step3p7", HEADS | STEP),
    # Without limits, and with as many heads in all layers; a window in all but one.
    "step3.7-plain": (
        "Step3p7",
        HEADS
        | {key: value for key, value in STEP.items() if not key.startswith(("swiglu", "mlp_layer", "num_sliding"))}
        | {"layer_types": [*_STEP_KINDS[1:3] * 2, *_STEP_KINDS[:2]], "query_pre_attn_scalar": 20}
        | {"tie_word_embeddings": True},
    ),
    "laguna": ("Laguna", HEADS | LAGUNA),
    "laguna-elements": (
        "Laguna",
        HEADS
        | LAGUNA
        | {"gating": "per-element", "moe_router_logit_softcapping": 0.5, "tie_word_embeddings": True}
        | {"mlp_layer_types": ["sparse", "dense", "sparse", "sparse", "sparse", "dense"]},
    ),
    # As many heads in all layers, none of which has a window.
    "laguna-full": (
        "Laguna",
        HEADS
        | {key: value for key, value in LAGUNA.items() if key not in ("layer_types", "num_attention_heads_per_layer")},
    ),
    "kolibri": (
        "Kolibri1",
        HEADS
        | {"num_hidden_layers": 6, "sliding_window": 16, "num_experts": 8, "num_experts_per_tok": 3}
        | {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 80, "rope_parameters": LLAMA3},
    ),
    "kolibri-full": (
        "Kolibri1",
        HEADS
        | {"layer_types": ["full_attention"] * 4, "num_experts": 5, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 48, "norm_topk_prob": True},
    ),
}
FAMILIES |= {
    # As GGUF files can say it: with as many heads in all layers.
    "kimi-linear-plain": ("KimiLinear", KIMI | {"linear_num_heads": 6}),
    # As GGUF files can say it: with the published chunks and places of the layers, and equal factors.
    "llama4-published": (
        "Llama4",
        {key: value for key, value in LLAMA4.items() if key != "attention_chunk_size"}
        | {"no_rope_layer_interval": 4, "interleave_moe_layer_step": 2, "rope_parameters": {"rope_theta": 5e5}},
    ),
    "deepseek-v3.2-mscale": (
        "DeepseekV32",
        LATENT
        | GROUPS
        | INDEXER
        | {"num_experts_per_tok": 3, "rope_parameters": {**YARN, "mscale": 1.3, "mscale_all_dim": 1.3}},
    ),
    "bailing-hybrid": ("BailingHybrid", BAILING),
    "bailing-hybrid-other": (
        "BailingHybrid",
        BAILING
        | {"q_lora_rank": 56, "kda_safe_gate": False, "short_conv_kernel_size": 3, "num_hidden_layers": 4}
        | {"layer_types": [f"{kind}_attention" for kind in ("full", "linear", "linear", "full")]}
        | {"mlp_layer_types": ["sparse", "dense", "sparse", "dense"], "moe_renormalize": False}
        | {"n_shared_experts": 2, "n_group": 1, "topk_group": 1, "rope_parameters": MSCALE},
    ),
    # As GGUF files can say it: with windows in the published places, or in no layer.
    "laguna-published": (
        "Laguna",
        HEADS | LAGUNA | {"layer_types": [f"{kind}_attention" for kind in ("full", *["sliding"] * 3) * 2][:6]},
    ),
    "laguna-published-full": (
        "Laguna",
        HEADS
        | {key: value for key, value in LAGUNA.items() if key not in ("layer_types", "num_attention_heads_per_layer")}
        | {"sliding_window": 0, "gating": "per-element", "tie_word_embeddings": True}
        | {"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 4},
    ),
    # As GGUF files can say it: with the same rotary base in all layers that are rotated.
    "granite-swa-published": (
        "GraniteSWA",
        GRANITE
        | {"num_hidden_layers": 5, "sliding_window": 16, "layer_rope_theta": [500.0, 500.0, 0, 500.0, 500.0]}
        | {"rope_parameters": {"rope_theta": 500.0}, "attention_bias": True, "tie_word_embeddings": True},
    ),
    # As llama.cpp's converter can say it: of whole groups of layers.
    "bailing-hybrid-published": ("BailingHybrid", BAILING | {"num_hidden_layers": 6, "q_lora_rank": 56}),
}
