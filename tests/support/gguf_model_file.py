"""Writes a model of transformers as a GGUF file, as the usual converter does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor
from transformers.models.step3p7.modeling_step3p7 import Step3p7RotaryEmbedding

from support.gguf_hybrid_models import (
    bailing_hybrid_tensors,
    falcon_h1_tensor,
    kimi_linear_tensors,
    mamba2_tensor,
    nemotron_h_name,
    write_bailing_hybrid_config,
    write_falcon_h1_config,
    write_kimi_linear_config,
    write_nemotron_h_config,
)

# transformers' model_type to the file's architecture, and to gguf's table of names.
ARCHITECTURES = {
    "llama": ("llama", gguf.MODEL_ARCH.LLAMA),
    "llama4_text": ("llama4", gguf.MODEL_ARCH.LLAMA4),
    "qwen2": ("qwen2", gguf.MODEL_ARCH.QWEN2),
    "qwen3": ("qwen3", gguf.MODEL_ARCH.QWEN3),
    "qwen3_moe": ("qwen3moe", gguf.MODEL_ARCH.QWEN3MOE),
    "mixtral": ("llama", gguf.MODEL_ARCH.LLAMA),
    "ministral3": ("mistral3", gguf.MODEL_ARCH.MISTRAL3),
    "gemma2": ("gemma2", gguf.MODEL_ARCH.GEMMA2),
    "gemma3_text": ("gemma3", gguf.MODEL_ARCH.GEMMA3),
    "gemma4_text": ("gemma4", gguf.MODEL_ARCH.GEMMA4),
    "smollm3": ("smollm3", gguf.MODEL_ARCH.SMOLLM3),
    "apertus": ("apertus", gguf.MODEL_ARCH.APERTUS),
    "arcee": ("arcee", gguf.MODEL_ARCH.ARCEE),
    "seed_oss": ("seed_oss", gguf.MODEL_ARCH.SEED_OSS),
    "ernie4_5": ("ernie4_5", gguf.MODEL_ARCH.ERNIE4_5),
    "ernie4_5_moe": ("ernie4_5-moe", gguf.MODEL_ARCH.ERNIE4_5_MOE),
    "glm": ("chatglm", gguf.MODEL_ARCH.CHATGLM),
    "glm4": ("glm4", gguf.MODEL_ARCH.GLM4),
    "starcoder2": ("starcoder2", gguf.MODEL_ARCH.STARCODER2),
    "stablelm": ("stablelm", gguf.MODEL_ARCH.STABLELM),
    "afmoe": ("afmoe", gguf.MODEL_ARCH.AFMOE),
    "mimo_v2_flash": ("mimo2", gguf.MODEL_ARCH.MIMO2),
    "step3p5": ("step35", gguf.MODEL_ARCH.STEP35),
    "hy_v3": ("hy_v3", gguf.MODEL_ARCH.EXAONE_MOE),  # which has the same names
    "exaone_moe": ("exaone-moe", gguf.MODEL_ARCH.EXAONE_MOE),
    "olmoe": ("olmoe", gguf.MODEL_ARCH.OLMOE),
    "hunyuan_v1_dense": ("hunyuan-dense", gguf.MODEL_ARCH.HUNYUAN_DENSE),
    "hunyuan_v1_moe": ("hunyuan-moe", gguf.MODEL_ARCH.HUNYUAN_MOE),
    "nemotron": ("nemotron", gguf.MODEL_ARCH.NEMOTRON),
    "jais2": ("jais2", gguf.MODEL_ARCH.JAIS2),
    "olmo": ("olmo", gguf.MODEL_ARCH.OLMO),
    "phi": ("phi2", gguf.MODEL_ARCH.PHI2),
    "gpt_neox": ("gptneox", gguf.MODEL_ARCH.GPTNEOX),
    # Newer than gguf's tables, with the names of others.
    "mellum": ("mellum", gguf.MODEL_ARCH.QWEN3MOE),
    "cohere2_moe": ("cohere2moe", gguf.MODEL_ARCH.DOTS1),
    "dots1": ("dots1", gguf.MODEL_ARCH.DOTS1),
    "laguna": ("laguna", gguf.MODEL_ARCH.STEP35),
    "granite_swa": ("granite_swa", gguf.MODEL_ARCH.GRANITE),
    "granitemoe_swa": ("granite_swa", gguf.MODEL_ARCH.GRANITE_MOE),
    "gemma": ("gemma", gguf.MODEL_ARCH.GEMMA),
    "olmo2": ("olmo2", gguf.MODEL_ARCH.OLMO2),
    "olmo3": ("olmo2", gguf.MODEL_ARCH.OLMO2),
    "exaone4": ("exaone4", gguf.MODEL_ARCH.EXAONE4),
    "cohere": ("command-r", gguf.MODEL_ARCH.COMMAND_R),
    "cohere2": ("cohere2", gguf.MODEL_ARCH.COHERE2),
    "phi3": ("phi3", gguf.MODEL_ARCH.PHI3),
    "phimoe": ("phimoe", gguf.MODEL_ARCH.PHIMOE),
    "gpt2": ("gpt2", gguf.MODEL_ARCH.GPT2),
    "gpt_oss": ("gpt-oss", gguf.MODEL_ARCH.GPT_OSS),
    "qwen2_moe": ("qwen2moe", gguf.MODEL_ARCH.QWEN2MOE),
    "glm4_moe": ("glm4moe", gguf.MODEL_ARCH.GLM4_MOE),
    "deepseek_v2": ("deepseek2", gguf.MODEL_ARCH.DEEPSEEK2),
    "deepseek_v3": ("deepseek2", gguf.MODEL_ARCH.DEEPSEEK2),
    "glm_moe_dsa": ("glm-dsa", gguf.MODEL_ARCH.GLM_DSA),
    "deepseek_v32": ("deepseek32", gguf.MODEL_ARCH.GLM_DSA),  # newer than gguf's tables, with the same names
    "mistral4": ("mistral4", gguf.MODEL_ARCH.MISTRAL4),
    "glm4_moe_lite": ("deepseek2", gguf.MODEL_ARCH.DEEPSEEK2),
    "youtu": ("deepseek2", gguf.MODEL_ARCH.DEEPSEEK2),
    "minicpm3": ("minicpm3", gguf.MODEL_ARCH.MINICPM3),
    "minimax_m2": ("minimax-m2", gguf.MODEL_ARCH.MINIMAXM2),
    "granite": ("granite", gguf.MODEL_ARCH.GRANITE),
    "granitemoe": ("granitemoe", gguf.MODEL_ARCH.GRANITE_MOE),
    "granitemoeshared": ("granitemoe", gguf.MODEL_ARCH.GRANITE_MOE),
    "qwen2_5_vl_text": ("qwen2vl", gguf.MODEL_ARCH.QWEN2VL),
    "qwen3_vl_text": ("qwen3vl", gguf.MODEL_ARCH.QWEN3VL),
    "qwen3_vl_moe_text": ("qwen3vlmoe", gguf.MODEL_ARCH.QWEN3VLMOE),
    "qwen3_next": ("qwen3next", gguf.MODEL_ARCH.QWEN3NEXT),
    "qwen3_5_text": ("qwen35", gguf.MODEL_ARCH.QWEN35),
    "qwen3_5_moe_text": ("qwen35moe", gguf.MODEL_ARCH.QWEN35MOE),
    "lfm2": ("lfm2", gguf.MODEL_ARCH.LFM2),
    "lfm2_moe": ("lfm2moe", gguf.MODEL_ARCH.LFM2MOE),
    "granitemoehybrid": ("granitehybrid", gguf.MODEL_ARCH.GRANITE_HYBRID),
    "falcon_h1": ("falcon-h1", gguf.MODEL_ARCH.FALCON_H1),
    "nemotron_h": ("nemotron_h", gguf.MODEL_ARCH.NEMOTRON_H),
    "kimi_linear": ("kimi-linear", gguf.MODEL_ARCH.KIMI_LINEAR),
    # Newer than gguf's tables, with the names of others.
    "bailing_hybrid": ("bailingmoe3", gguf.MODEL_ARCH.KIMI_LINEAR),
    "muse_glimmer_text": ("muse-glimmer", gguf.MODEL_ARCH.AFMOE),
    "nemotron_h with experts": ("nemotron_h_moe", gguf.MODEL_ARCH.NEMOTRON_H_MOE),
}


# Those of Nemotron-H need not be undone, because nothing is rotated.
PERMUTED = (
    "llama",
    "mistral3",
    "smollm3",
    "arcee",
    "granite",
    "granitemoe",
    "granite_swa",
    "granitehybrid",
    "nemotron_h",
    "nemotron_h_moe",
    "olmo",
    "muse-glimmer",
)
# Ends of the names of norms whose weights are stored with 1 added.
SHIFTED_NORMS = dict.fromkeys(("gemma", "gemma2", "gemma3", "nemotron", "step35"), "norm.weight") | {
    "muse-glimmer": "layernorm.weight"
}
LATENT = ("deepseek2", "deepseek32", "glm-dsa", "mistral4")
WINDOWED = ("gemma2", "gemma3", "phi3", "phimoe", "olmo2", "exaone4", "cohere2", "cohere2moe", "mellum", "gpt-oss")
WINDOWED += ("afmoe", "exaone-moe", "mimo2", "step35", "laguna", "granite_swa", "muse-glimmer")


def write_gguf(
    path: Path,
    model: Any,
    quantized: dict[str, gguf.GGMLQuantizationType] | None = None,
    *,
    matrices: gguf.GGMLQuantizationType | None = None,
    is_fused: bool = False,
    tokens: list[str] | None = None,
    nextn: list[dict[str, Tensor]] | None = None,
    name: str | None = None,
    more: Callable[[gguf.GGUFWriter], None] | None = None,
) -> None:
    """Write the file.

    Args:
        path: path of the file.
        model: model of transformers.
        quantized: types of quantised tensors by the last part of their names, such as ``ffn_down_exps``.
        matrices: type of the other matrices, but for filters of convolutions and weights of norms; ``None`` for fp32.
        is_fused: whether gate and up of all experts are one tensor, and Qwen3-Next's matrices of linear attention, and
            those of latent attention, are left as they are, as in older files.
        tokens: vocabulary of a byte-level tokenizer whose only merge is that of its first two tokens; ``None`` for a
            file without a tokenizer.
        nextn: tensors of the layers behind those that the configuration counts, which are for multi-token prediction.
        name: name of the architecture, where it is not the usual one of such a model.
        more: function that writes the keys of the tokenizer, and others; ``None`` for none.
    """
    quantized = quantized or {}
    config = model.config.get_text_config()
    with_experts = " with experts" if config.model_type == "nemotron_h" and "moe" in config.layers_block_type else ""
    architecture, table = ARCHITECTURES[config.model_type + with_experts]
    if architecture == "granitehybrid" and "linear_attention" not in config.layer_types:
        architecture = "granitemoe" if config.num_local_experts else "granite"
    architecture = name or architecture
    writer = gguf.GGUFWriter(path, architecture)
    if more is not None:
        more(writer)
    elif tokens is None:
        writer.add_tokenizer_model("none")
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(tokens)
        writer.add_token_merges([f"{tokens[0]} {tokens[1]}"])  # llama.cpp wants at least one
    writer.add_vocab_size(config.vocab_size)
    _write_config(writer, architecture, config, is_fused)
    num_blocks = config.num_hidden_layers
    if nextn is not None:
        writer.add_uint32(f"{architecture}.nextn_predict_layers", len(nextn))
        for layer in nextn:
            for name, values in layer.items():
                writer.add_tensor(f"blk.{num_blocks}.nextn.{name}.weight", values.contiguous().numpy())
            num_blocks += 1
    writer.add_block_count(num_blocks)
    names = gguf.get_tensor_name_map(table, num_blocks)
    tensors = dict(model.state_dict())
    if architecture in ("step35", "muse-glimmer"):  # of which the text alone
        tensors = {
            name.replace("model.language_model.", "model."): values
            for name, values in tensors.items()
            if name.startswith(("model.language_model.", "lm_head."))
        }
    if architecture == "apertus":
        for key in (gguf.Keys.xIELU.ALPHA_P, gguf.Keys.xIELU.ALPHA_N, gguf.Keys.xIELU.BETA, gguf.Keys.xIELU.EPS):
            stored = [f"model.layers.{layer}.mlp.act_fn.{key.rpartition('.')[2]}" for layer in range(num_blocks)]
            writer.add_array(key, [tensors.pop(name).item() for name in stored])
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    for name, values in tensors.items():
        for new_name, tensor in _converted(name, values.float(), architecture, config, names, is_fused):
            part = new_name.rpartition(".")[0].rpartition(".")[2]
            is_matrix = tensor.dim() > 1 and "conv" not in new_name and "norm" not in new_name
            quantize = quantized.get(part, matrices if is_matrix else None)
            tensor = tensor.contiguous()
            if quantize is None or not new_name.endswith(".weight"):
                writer.add_tensor(new_name, tensor.numpy())
            elif quantize == gguf.GGMLQuantizationType.BF16:  # gguf's own rounding is slow
                writer.add_tensor(new_name, tensor.bfloat16().view(torch.uint8).numpy(), raw_dtype=quantize)
            else:
                writer.add_tensor(new_name, gguf.quantize(tensor.numpy(), quantize), raw_dtype=quantize)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_config(writer: gguf.GGUFWriter, architecture: str, config: Any, is_fused: bool) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    if architecture not in ("step35", "laguna"):  # which have one for each layer
        writer.add_head_count(config.num_attention_heads)
    if architecture == "gemma4":
        _write_gemma4_config(writer, config)
        return
    if architecture == "falcon-h1":
        write_falcon_h1_config(writer, config)
        return
    if architecture.startswith("nemotron_h"):
        write_nemotron_h_config(writer, config)
        return
    if architecture == "kimi-linear":
        write_kimi_linear_config(writer, config)
        return
    if architecture == "bailingmoe3":
        write_bailing_hybrid_config(writer, config)
        return
    if architecture == "gpt2":
        writer.add_feed_forward_length(4 * config.hidden_size)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    if architecture == "lfm2":
        width = int(2 * config.intermediate_size / 3)
        writer.add_feed_forward_length(-(-width // config.block_multiple_of) * config.block_multiple_of)
    else:
        is_dense = config.model_type == "granitemoehybrid" and not config.num_local_experts
        width = config.shared_intermediate_size if is_dense else config.intermediate_size
        writer.add_feed_forward_length(getattr(config, "prefix_dense_intermediate_size", None) or width)
    if architecture.startswith("lfm2"):
        heads = [config.num_key_value_heads if kind == "full_attention" else 0 for kind in config.layer_types]
        writer.add_head_count_kv(heads)
        writer.add_shortconv_l_cache(config.conv_L_cache)
    elif config.model_type == "granitemoehybrid":
        kinds = config.layer_types
        writer.add_head_count_kv([config.num_key_value_heads if kind == "full_attention" else 0 for kind in kinds])
        writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")
        writer.add_ssm_conv_kernel(config.mamba_d_conv)
        writer.add_ssm_state_size(config.mamba_d_state)
        writer.add_ssm_group_count(config.mamba_n_groups)
        writer.add_ssm_time_step_rank(config.mamba_n_heads)
        writer.add_ssm_inner_size(config.mamba_n_heads * config.mamba_d_head)
    elif architecture == "mimo2":
        heads = config.num_key_value_heads
        writer.add_head_count_kv([2 * heads if kind == "sliding_attention" else heads for kind in config.layer_types])
    elif architecture in LATENT and not is_fused:
        writer.add_head_count_kv(1)  # all heads see the same latent vectors
    elif architecture != "gptneox":
        writer.add_head_count_kv(config.num_key_value_heads)
    if architecture == "starcoder2":
        writer.add_layer_norm_eps(config.norm_epsilon)
    elif architecture == "nemotron":
        writer.add_layer_norm_eps(config.norm_eps)
    elif architecture == "olmo":
        writer.add_layer_norm_eps(1e-5)
    elif hasattr(config, "layer_norm_eps"):
        writer.add_layer_norm_eps(config.layer_norm_eps)
        if hasattr(config, "logit_scale"):
            writer.add_logit_scale(config.logit_scale)
    else:
        writer.add_layer_norm_rms_eps(config.norm_eps if architecture.startswith("lfm2") else config.rms_norm_eps)
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    base = rope["rope_theta"]
    if "alpha" in rope:
        base *= rope["alpha"] ** (config.head_dim / (config.head_dim - 2))
    writer.add_rope_freq_base(base)
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "beta_fast" in rope:
            writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
            writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    if beta := rope.get("llama_4_scaling_beta"):
        writer.add_attn_temperature_scale(beta)
    if architecture == "mistral3" and "mscale_all_dim" in rope:
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
    if architecture in LATENT:
        _write_latent_attention(writer, config, is_fused)
    elif architecture == "minicpm3":
        _write_minicpm3(writer, config)
    elif getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(getattr(config, "v_head_dim", config.head_dim))
    if getattr(config, "sliding_window", None) and architecture in WINDOWED:
        writer.add_sliding_window(config.sliding_window)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if experts := getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None):
        writer.add_expert_count(experts)
        chosen = config.num_experts_per_tok
        writer.add_expert_used_count(chosen[0] if isinstance(chosen, list) else chosen)
    if getattr(config, "moe_intermediate_size", None) and config.model_type not in ("youtu", "minicpm3"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    elif architecture == "gpt-oss":
        writer.add_expert_feed_forward_length(config.intermediate_size)
    if getattr(config, "shared_expert_intermediate_size", None):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if (share := rope.get("partial_rotary_factor", 1.0)) != 1.0 and architecture != "step35":
        head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
        writer.add_rope_dimension_count(int(head_dim * share))
    if architecture.startswith("granite"):
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if getattr(config, "shared_intermediate_size", None):
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    if hasattr(config, "linear_conv_kernel_dim"):
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
        writer.add_full_attention_interval(config.layer_types.index("full_attention") + 1)
        if architecture != "qwen3next":  # newer than gguf's tables
            is_linear = [kind == "linear_attention" for kind in config.layer_types]
            writer.add_array(f"{architecture}.attention.recurrent_layers", is_linear)
    if "mrope_section" in rope:
        writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    elif architecture.startswith("qwen35"):
        pairs = int(config.head_dim * share) // 2
        writer.add_rope_dimension_sections([pairs - 2 * (pairs // 3), pairs // 3, pairs // 3, 0])
    if architecture == "hy_v3":
        writer.add_expert_shared_feed_forward_length(config.num_shared_experts * config.moe_intermediate_size)
        writer.add_expert_weights_norm(True)
        writer.add_expert_weights_scale(config.router_scaling_factor)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if architecture == "mimo2":
        _write_mimo_config(writer, config)
    if architecture == "step35":
        _write_step_config(writer, config)
    if architecture == "laguna":
        _write_laguna_config(writer, config)
    if architecture == "granite_swa":
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
        if not all(config.layer_rope_theta):
            writer.add_array("granite_swa.attention.rope_pattern", [base > 0 for base in config.layer_rope_theta])
    if architecture == "exaone-moe":
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if architecture in ("afmoe", "exaone-moe"):
        dense = config.num_dense_layers if architecture == "afmoe" else config.mlp_layer_types.count("dense")
        writer.add_leading_dense_block_count(dense)
        writer.add_expert_shared_count(config.num_shared_experts)
        writer.add_expert_weights_scale(config.route_scale if architecture == "afmoe" else config.routed_scaling_factor)
    if architecture == "exaone-moe":
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
    if architecture == "llama4":
        writer.add_interleave_moe_layer_step(config.interleave_moe_layer_step)
        writer.add_feed_forward_length(config.intermediate_size_mlp)
        writer.add_expert_feed_forward_length(config.intermediate_size)
    if architecture == "lfm2moe":
        writer.add_leading_dense_block_count(config.num_dense_layers)
    if architecture in ("glm4moe", "minimax-m2", "lfm2moe", "dots1"):
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if architecture == "gptneox":
        writer.add_parallel_residual(config.use_parallel_residual)
    if architecture == "hunyuan-moe":
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.intermediate_size)
        writer.add_expert_shared_count(1)
    if architecture == "muse-glimmer":
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
        writer.add_logit_scale(config.output_multiplier)
    if architecture in ("mellum", "cohere2moe", "muse-glimmer"):
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if architecture == "cohere2moe":
        if config.rms_norm_eps is not None:
            writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        shared = config.num_shared_experts
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_expert_shared_count(shared)
        writer.add_expert_shared_feed_forward_length(shared * config.intermediate_size)
        writer.add_leading_dense_block_count(config.mlp_layer_types.count("dense"))
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if architecture == "ernie4_5-moe":
        writer.add_leading_dense_block_count(config.moe_layer_start_index)
        writer.add_expert_shared_feed_forward_length(config.moe_num_shared_experts * config.moe_intermediate_size)
    if architecture in ("glm4moe", "dots1"):
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)


def _write_gemma4_config(writer: gguf.GGUFWriter, config: Any) -> None:
    kinds, prefix = config.layer_types, "gemma4"
    full, local = kinds.index("full_attention"), kinds.index("sliding_attention")
    first = config.num_hidden_layers - config.num_kv_shared_layers
    shapes = [config.per_layer_config[layer] for layer in range(len(kinds))]
    wide = 2 if config.use_double_wide_mlp else 1
    writer.add_feed_forward_length(
        [config.intermediate_size * (wide if layer >= first else 1) for layer in range(len(kinds))]
    )
    writer.add_head_count_kv([shape.num_key_value_heads for shape in shapes])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
    writer.add_float32(f"{prefix}.rope.freq_base_swa", config.rope_parameters["sliding_attention"]["rope_theta"])
    for suffix, size in (("", shapes[full].head_dim), ("_swa", shapes[local].head_dim)):
        for kind in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
            writer.add_uint32(f"{prefix}.{kind}{suffix}", size)
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])
    writer.add_uint32(f"{prefix}.attention.shared_kv_layers", config.num_kv_shared_layers)
    writer.add_uint32(f"{prefix}.embedding_length_per_layer_input", config.hidden_size_per_layer_input)
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.enable_moe_block:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    rotated = int(config.rope_parameters["full_attention"]["partial_rotary_factor"] * shapes[full].head_dim // 2)
    factors = torch.full((shapes[full].head_dim // 2,), 1e30)
    factors[:rotated] = 1.0
    writer.add_tensor("rope_freqs.weight", factors.numpy())


def _write_mimo_config(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    writer.add_float32("mimo2.rope.freq_base_swa", config.rope_parameters["sliding_attention"]["rope_theta"])
    if config.attention_value_scale is not None:
        writer.add_float32("mimo2.attention.value_scale", config.attention_value_scale)
    writer.add_expert_group_count(config.n_group)
    writer.add_expert_group_used_count(config.topk_group)


def _write_laguna_config(writer: gguf.GGUFWriter, config: Any) -> None:
    """Write its keys, which do not say which layers have a window."""
    writer.add_array("laguna.attention.head_count", config.num_attention_heads_per_layer)
    full, sliding = (config.rope_parameters[f"{kind}_attention"] for kind in ("full", "sliding"))
    writer.add_float32("laguna.rope.scaling.yarn_attn_factor", full["attention_factor"])
    writer.add_float32("laguna.rope.freq_base_swa", sliding["rope_theta"])
    writer.add_uint32("laguna.rope.dimension_count_swa", int(config.head_dim * sliding["partial_rotary_factor"]))
    writer.add_leading_dense_block_count(config.mlp_layer_types.index("sparse"))
    writer.add_expert_weights_norm(True)
    writer.add_expert_weights_scale(config.moe_routed_scaling_factor)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _write_step_config(writer: gguf.GGUFWriter, config: Any) -> None:
    is_windowed = [kind == "sliding_attention" for kind in config.layer_types]
    heads = [config.per_layer_config[layer].num_attention_heads for layer in range(len(is_windowed))]
    writer.add_array("step35.attention.head_count", heads)
    writer.add_sliding_window_pattern(is_windowed)
    rope = config.rope_parameters
    writer.add_float32("step35.rope.freq_base_swa", rope["sliding_attention"]["rope_theta"])
    writer.add_expert_shared_feed_forward_length(config.share_expert_dim)
    writer.add_expert_weights_scale(config.moe_router_scaling_factor)
    writer.add_expert_weights_norm(True)
    for name in ("exp", "shexp"):
        limits = config.swiglu_limits if name == "exp" else config.swiglu_limits_shared
        if limits is not None:
            writer.add_array(f"step35.swiglu_clamp_{name}", [float(limit or 0.0) for limit in limits])
    rotary_embedding = Step3p7RotaryEmbedding(config)
    size = int(config.head_dim * rope["full_attention"]["partial_rotary_factor"])
    plain = rope["full_attention"]["rope_theta"] ** -(torch.arange(0, size, 2) / size)
    factors = torch.ones(config.head_dim // 2)
    factors[: size // 2] = plain / rotary_embedding.full_attention_inv_freq
    writer.add_tensor("rope_freqs.weight", factors.numpy())


def _write_latent_attention(writer: gguf.GGUFWriter, config: Any, is_fused: bool) -> None:
    rope = config.rope_parameters
    if config.q_lora_rank:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    heads = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    if is_fused:
        writer.add_key_length(heads[0])
        writer.add_value_length(heads[1])
    else:
        writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
        writer.add_value_length(config.kv_lora_rank)
        writer.add_key_length_mla(heads[0])
        writer.add_value_length_mla(heads[1])
    if "mscale_all_dim" in rope:
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    if config.model_type in ("glm_moe_dsa", "deepseek_v32"):
        writer.add_indexer_head_count(config.index_n_heads)
        writer.add_indexer_key_length(config.index_head_dim)
        writer.add_indexer_top_k(config.index_topk)
    if config.model_type == "glm_moe_dsa":  # newer than gguf's tables
        writer.add_array("glm-dsa.attention.indexer.types", [kind == "full" for kind in config.indexer_types])
    if config.model_type == "youtu":  # without experts, but the keys are there
        writer.add_leading_dense_block_count(config.num_hidden_layers)
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_expert_shared_count(0)
        return
    writer.add_leading_dense_block_count(getattr(config, "first_k_dense_replace", 1))
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    kind = gguf.ExpertGatingFuncType
    if config.model_type == "deepseek_v2":
        writer.add_expert_gating_func(kind.SOFTMAX)
        return
    writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_expert_gating_func(kind.SOFTMAX if config.model_type == "mistral4" else kind.SIGMOID)
    writer.add_expert_group_count(config.n_group)
    writer.add_expert_group_used_count(config.topk_group)


def _write_minicpm3(writer: gguf.GGUFWriter, config: Any) -> None:
    if config.q_lora_rank:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_key_length(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    for kind in ("short", "long"):
        factors = torch.tensor(config.rope_parameters[f"{kind}_factor"], dtype=torch.float32)
        writer.add_tensor(f"rope_factors_{kind}.weight", factors.numpy())


def _converted(
    name: str, values: Tensor, architecture: str, config: Any, names: gguf.TensorNameMap, is_fused: bool
) -> list[tuple[str, Tensor]]:
    if ".linear_attn." in name:
        if name.endswith("in_proj_qkvz.weight") and not is_fused:
            sizes = config.linear_key_head_dim, config.linear_num_value_heads // config.linear_num_key_heads
            widths = [sizes[0]] * 2 + [sizes[1] * config.linear_value_head_dim] * 2
            parts = values.view(config.linear_num_key_heads, -1, values.shape[1]).split(widths, dim=1)
            qkv = torch.cat([part.flatten(0, 1) for part in parts[:3]])
            block = name.split(".")[2]
            return [(f"blk.{block}.attn_qkv.weight", qkv), (f"blk.{block}.attn_gate.weight", parts[3].flatten(0, 1))]
        if architecture.startswith("qwen35"):
            values = _tiled(name, values, config)
        if name.endswith("A_log"):
            values = -values.exp()
        name = name.replace("dt_bias", "dt_proj.bias")
        values = values.squeeze(1) if "conv1d" in name else values
    elif architecture in ("qwen3next", "qwen35", "qwen35moe") and "norm" in name:
        values = values + 1
    if architecture == "falcon-h1":
        values = falcon_h1_tensor(name, values, config)
    if architecture == "kimi-linear":
        name, values, filters = kimi_linear_tensors(name, values)
        if filters:
            return filters
    if architecture == "bailingmoe3":
        name, values, stored_parts = bailing_hybrid_tensors(name, values, config)
        if stored_parts:
            return stored_parts
    if architecture.startswith("nemotron_h"):
        name, values = mamba2_tensor(nemotron_h_name(name), values, config.n_groups)
    if ".mamba." in name:
        name, values = mamba2_tensor(name, values, config.mamba_n_groups)
    if architecture == "gpt-oss" and ".experts." in name:
        # gpt-oss has [experts, in, out], and the columns of gate and up alternate.
        block, is_bias = name.split(".")[2], name.endswith("_bias")
        stored = f"blk.{block}.ffn_{{}}_exps.{'bias' if is_bias else 'weight'}"
        if "down_proj" in name:
            return [(stored.format("down"), values if is_bias else values.mT)]
        parts = {"gate": values[..., ::2], "up": values[..., 1::2]}
        return [(stored.format(part), rows if is_bias else rows.mT) for part, rows in parts.items()]
    if name.endswith("kv_b_proj.weight") and not is_fused and architecture != "minicpm3":
        heads = values.view(config.num_attention_heads, -1, values.shape[1])
        keys, values = heads.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
        block = name.split(".")[2]
        return [(f"blk.{block}.attn_k_b.weight", keys.mT), (f"blk.{block}.attn_v_b.weight", values)]
    if name.endswith("sinks"):
        return [(f"blk.{name.split('.')[2]}.attn_sinks.weight", values)]
    if architecture == "llama4" and ".experts." in name:  # [experts, in, out]
        values = values.mT
    if name.endswith("experts.gate_up_proj"):
        gate, up = values.chunk(2, dim=1)
        block = name.split(".")[2]
        if is_fused or architecture in ("gemma4", "granite_swa"):
            return [(f"blk.{block}.ffn_gate_up_exps.weight", values)]
        return [(f"blk.{block}.ffn_gate_exps.weight", gate), (f"blk.{block}.ffn_up_exps.weight", up)]
    if name.endswith("experts.down_proj"):
        return [(f"blk.{name.split('.')[2]}.ffn_down_exps.weight", values)]
    if name.endswith("shared_mlp.input_linear.weight") and architecture == "granite_swa":
        return [(f"blk.{name.split('.')[2]}.ffn_up_shexp.weight", values)]
    if name.endswith("shared_mlp.input_linear.weight"):
        gate, up = values.chunk(2)
        block, kind = name.split(".")[2], "_shexp" if config.num_local_experts else ""
        return [(f"blk.{block}.ffn_gate{kind}.weight", gate), (f"blk.{block}.ffn_up{kind}.weight", up)]
    if name.endswith("shared_mlp.output_linear.weight") and not config.num_local_experts:
        return [(f"blk.{name.split('.')[2]}.ffn_down.weight", values)]
    if architecture in PERMUTED and (".q_proj." in name or ".k_proj." in name):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        pairs = values.view(heads, 2, -1, *values.shape[1:])
        values = pairs.transpose(1, 2).reshape(values.shape)
    if architecture == "muse-glimmer" and name.endswith("q_proj.weight"):
        # Norms of queries and keys, which have no weights, with the scale of queries.
        block, ones = name.split(".")[2], torch.ones(config.head_dim)
        norms = {"attn_q_norm": config.qk_scale_factor * ones, "attn_k_norm": ones}
        return [(f"blk.{block}.{part}.weight", tensor) for part, tensor in ({"attn_q": values} | norms).items()]
    if architecture == "gemma4" and ".router." in name and not name.endswith("proj.weight"):
        part = "ffn_gate_inp" if name.endswith("router.scale") else "ffn_down_exps"
        return [(f"blk.{name.split('.')[2]}.{part}.scale", values)]
    if architecture == "gemma4" and name.endswith("layer_scalar"):
        name += ".weight"
    elif (end := SHIFTED_NORMS.get(architecture)) and name.endswith(end):
        values = values + 1
    if ".query_key_value." in name:
        heads = values.unflatten(0, (config.num_attention_heads, 3, -1))
        values = heads.transpose(0, 1).flatten(0, 2)
    if architecture == "gpt2" and values.dim() == 2 and ".h." in name:
        values = values.T
    if name.endswith("conv.conv.weight"):
        values = values.squeeze(1)
    if ".moe_statics." in name:
        name = name.replace("gate.moe_statics", "moe_statics")
    name = name.replace("expert_bias", "expert_bias.bias")
    name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    name = name.replace("block_sparse_moe.router.weight", "block_sparse_moe.router.layer.weight")
    stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert stored is not None, name
    if architecture == "hy_v3":
        stored = stored.replace("exp_probs_b.bias", "exp_probs_b")
    return [(stored, values)]


def _tiled(name: str, values: Tensor, config: Any) -> Tensor:
    """Put the first value heads of all key heads first, then the second ones, and so on, as llama.cpp does."""
    key_heads, value_heads = config.linear_num_key_heads, config.linear_num_value_heads
    part = name.split(".")[4]
    width = 1 if part in ("A_log", "dt_bias", "in_proj_a", "in_proj_b") else config.linear_value_head_dim
    if part == "norm":
        return values
    if part == "out_proj":
        return _tiled(name.replace("out_proj", "in_proj_z"), values.T, config).T
    before = len(values) - value_heads * width  # queries and keys
    heads = values[before:].view(key_heads, value_heads // key_heads, width, *values.shape[1:])
    return torch.cat([values[:before], heads.transpose(0, 1).flatten(0, 2)])
