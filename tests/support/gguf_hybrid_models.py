"""How the usual converter writes Falcon-H1, Nemotron-H, Kimi Linear and Bailing hybrid, for
:mod:`support.gguf_model_file`.
"""

from typing import Any

import gguf
import torch
from torch import Tensor


def write_falcon_h1_config(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    sizes = config.mamba_d_conv, config.mamba_d_state, config.mamba_n_groups, config.mamba_n_heads
    _write_mamba2(writer, *sizes, config.mamba_n_heads * config.mamba_d_head)


def write_nemotron_h_config(writer: gguf.GGUFWriter, config: Any) -> None:
    """Which part a layer has follows from its number of heads and its width."""
    kinds, has_experts = config.layers_block_type, "moe" in config.layers_block_type
    writer.add_head_count_kv([config.num_key_value_heads if kind == "full_attention" else 0 for kind in kinds])
    width = config.moe_intermediate_size if has_experts else config.intermediate_size
    writer.add_feed_forward_length([width if kind in ("mlp", "moe") else 0 for kind in kinds])
    writer.add_rope_scaling_finetuned(False)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)  # of a norm without means
    if not has_experts:  # the other key is there if config.json has norm_eps, too
        writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
        writer.add_expert_group_count(config.n_group)  # as config.json has it
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    sizes = config.conv_kernel, config.ssm_state_size, config.n_groups, config.mamba_num_heads
    _write_mamba2(writer, *sizes, config.mamba_num_heads * config.mamba_head_dim)
    if has_experts:
        if config.moe_latent_size:
            writer.add_moe_latent_size(config.moe_latent_size)
        writer.add_expert_count(config.n_routed_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)


def _write_mamba2(writer: gguf.GGUFWriter, kernel: int, state: int, groups: int, heads: int, inner: int) -> None:
    writer.add_ssm_conv_kernel(kernel)
    writer.add_ssm_state_size(state)
    writer.add_ssm_group_count(groups)
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(inner)


def mamba2_tensor(name: str, values: Tensor, groups: int) -> tuple[str, Tensor]:
    """Bring a tensor of a Mamba-2 layer into the file's form; the name still is transformers'."""
    values = -values.exp() if name.endswith("A_log") else values
    if name.endswith((".A_log", ".D")):
        values = values[:, None]
    if name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
        values = values.view(groups, -1)
    return name.replace("dt_bias", "dt_proj.bias"), values.squeeze(1) if name.endswith("conv1d.weight") else values


def falcon_h1_tensor(name: str, values: Tensor, config: Any) -> Tensor:
    """Multiply a matrix by its factors."""
    gate, down = config.mlp_multipliers
    factors = {
        "embed_tokens.weight": config.embedding_multiplier,
        "lm_head.weight": config.lm_head_multiplier,
        "q_proj.weight": config.attention_in_multiplier,
        "k_proj.weight": config.attention_in_multiplier * config.key_multiplier,
        "v_proj.weight": config.attention_in_multiplier,
        "self_attn.o_proj.weight": config.attention_out_multiplier,
        "gate_proj.weight": gate,
        "down_proj.weight": down,
        "mamba.out_proj.weight": config.ssm_out_multiplier,
    }
    for end, factor in factors.items():
        if name.endswith(end):
            return values * factor
    if not name.endswith("mamba.in_proj.weight"):
        return values
    inner, states = config.mamba_n_heads * config.mamba_d_head, config.mamba_n_groups * config.mamba_d_state
    widths = torch.tensor([inner, inner, states, states, config.mamba_n_heads])
    rows = torch.tensor(config.ssm_multipliers).repeat_interleave(widths)
    return values * config.ssm_in_multiplier * rows[:, None]


def nemotron_h_name(name: str) -> str:
    """Return a tensor's name as published files have it, or as the table of names has it for those of all experts."""
    if ".mixer.experts." in name:
        return name.replace("mixer.", "mlp.") + ".weight"
    return name.replace("model.", "backbone.", 1)


def write_kimi_linear_config(writer: gguf.GGUFWriter, config: Any) -> None:
    """Layers with linear attention are those without key and value heads."""
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv([int(kind == "full_attention") for kind in config.layer_types])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_kda_head_dim(config.linear_head_dim)
    if config.q_lora_rank:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
    writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_leading_dense_block_count(config.mlp_layer_types.count("dense"))


def kimi_linear_tensors(name: str, values: Tensor) -> tuple[str, Tensor, list[tuple[str, Tensor]]]:
    """Bring a tensor into the file's form, or the filters of a convolution, which become three of the file's tensors.

    Returns:
        the name that published files have, the tensor, and the tensors of a convolution with the file's names.
    """
    if name.endswith("conv1d.weight"):
        parts = zip("qkv", values.chunk(3), strict=True)
        stored = f"blk.{name.split('.')[2]}.ssm_conv1d_"
        return name, values, [(f"{stored}{part}.weight", rows.view(1, len(rows), 1, -1)) for part, rows in parts]
    values = -values.exp() if name.endswith("A_log") else values
    return name.replace("forget_gate.", "").replace("dt_bias", "dt_proj.bias"), values, []


def write_bailing_hybrid_config(writer: gguf.GGUFWriter, config: Any) -> None:
    """The keys of Kimi Linear, and others."""
    write_kimi_linear_config(writer, config)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_bool("bailingmoe3.kda.safe_gate", config.kda_safe_gate)  # newer than gguf's tables
    writer.add_float32("bailingmoe3.kda.gate_lower_bound", config.kda_lower_bound)
    writer.add_expert_shared_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_expert_group_count(config.n_group)
    writer.add_expert_group_used_count(config.topk_group)


def bailing_hybrid_tensors(name: str, values: Tensor, config: Any) -> tuple[str, Tensor, list[tuple[str, Tensor]]]:
    """Do as :func:`kimi_linear_tensors`; decays and gate have one matrix each, and exp(A_log) no sign."""
    if name.endswith("self_attn.g_proj.weight"):
        layer = int(name.split(".")[2])
        part = "ssm_g_a" if config.layer_types[layer] == "linear_attention" else "attn_gate"
        return name, values, [(f"blk.{layer}.{part}.weight", values)]
    name, values, parts = kimi_linear_tensors(name.replace("f_proj", "f_a_proj"), values)
    return name, -values[:, None] if name.endswith("A_log") else values, parts
