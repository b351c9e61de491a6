"""Writes a model of transformers as a GGUF file, as the usual converter does."""

from pathlib import Path
from typing import Any

import gguf
from torch import Tensor

# transformers' model_type to the file's architecture, and to gguf's table of names.
ARCHITECTURES = {
    "llama": ("llama", gguf.MODEL_ARCH.LLAMA),
    "qwen2": ("qwen2", gguf.MODEL_ARCH.QWEN2),
    "qwen3": ("qwen3", gguf.MODEL_ARCH.QWEN3),
    "qwen3_moe": ("qwen3moe", gguf.MODEL_ARCH.QWEN3MOE),
    "mixtral": ("llama", gguf.MODEL_ARCH.LLAMA),
    "gemma2": ("gemma2", gguf.MODEL_ARCH.GEMMA2),
    "gemma3_text": ("gemma3", gguf.MODEL_ARCH.GEMMA3),
    "phi3": ("phi3", gguf.MODEL_ARCH.PHI3),
    "gpt2": ("gpt2", gguf.MODEL_ARCH.GPT2),
}


def write_gguf(path: Path, model: Any) -> None:
    config = model.config
    architecture, table = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, architecture)
    _write_config(writer, architecture, config)
    names = gguf.get_tensor_name_map(table, config.num_hidden_layers)
    tensors = dict(model.state_dict())
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    for name, values in tensors.items():
        for new_name, tensor in _converted(name, values.float(), architecture, config, names):
            writer.add_tensor(new_name, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_config(writer: gguf.GGUFWriter, architecture: str, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    if architecture == "gpt2":
        writer.add_feed_forward_length(4 * config.hidden_size)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if getattr(config, "sliding_window", None) and architecture in ("gemma2", "gemma3", "phi3"):
        writer.add_sliding_window(config.sliding_window)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if experts := getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if getattr(config, "moe_intermediate_size", None):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def _converted(
    name: str, values: Tensor, architecture: str, config: Any, names: gguf.TensorNameMap
) -> list[tuple[str, Tensor]]:
    if name.endswith("experts.gate_up_proj"):
        gate, up = values.chunk(2, dim=1)
        block = name.split(".")[2]
        return [(f"blk.{block}.ffn_gate_exps.weight", gate), (f"blk.{block}.ffn_up_exps.weight", up)]
    if name.endswith("experts.down_proj"):
        return [(f"blk.{name.split('.')[2]}.ffn_down_exps.weight", values)]
    if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        pairs = values.view(heads, 2, -1, values.shape[1])
        values = pairs.transpose(1, 2).reshape(values.shape)
    if architecture.startswith("gemma") and "norm" in name:
        values = values + 1
    if architecture == "gpt2" and values.dim() == 2 and ".h." in name:
        values = values.T
    stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert stored is not None, name
    return [(stored, values)]
