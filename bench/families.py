"""Random models of one kind of layer each, with the widths of real ones, fewer layers, and fewer experts."""

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import save_file
from tokenizers import pre_tokenizers

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from support.families import make_model
from support.gguf_model_file import ARCHITECTURES, write_gguf
from support.tiny_folder import write_byte_tokenizer

VOCAB_SIZE, MAX_TOKENS = 16384, 1024
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": MAX_TOKENS,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
}
EXPERTS = {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 512}
LINEAR = {
    "hidden_size": 2048,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
LATENT: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 16,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
}
# Name to family in tests/support/families.py and its sizes: Qwen3.5, its mixture of experts, Gemma 4, DeepSeek-V2-Lite,
# the same with indexers of DeepSeek-V3.2, which choose among a benchmark's few tokens, LFM2, LFM3, Granite 4,
# gpt-oss, Kimi Linear, Nemotron 3 Nano, Apertus 8B, Llama 4 and Laguna.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gated-delta-net": ("qwen3.5", LINEAR | {"intermediate_size": 6144}),
    "gated-delta-net-experts": (
        "qwen3.5-moe",
        LINEAR | EXPERTS | {"linear_num_value_heads": 32, "shared_expert_intermediate_size": 512},
    ),
    "gemma4": (
        "gemma4-inputs",
        {
            "hidden_size": 1536,
            "intermediate_size": 6144,
            "num_hidden_layers": 8,
            "layer_types": ["full_attention" if i % 4 == 3 else "sliding_attention" for i in range(8)],
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "global_head_dim": 512,
            "sliding_window": 512,
            "hidden_size_per_layer_input": 256,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "num_kv_shared_layers": 4,
        },
    ),
    "latent-attention": ("deepseek-v2", LATENT),
    "sparse-latent-attention": (
        "deepseek-v3.2",
        LATENT | {"index_n_heads": 32, "index_head_dim": 128, "index_topk": 32},
    ),
    "short-convolution": (
        "lfm2",
        {
            "hidden_size": 2048,
            "intermediate_size": 12288,
            "block_multiple_of": 256,
            "num_hidden_layers": 6,
            "layer_types": ["conv", "conv", "full_attention", "conv", "conv", "full_attention"],
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
    ),
    "long-short-convolution": (
        "lfm3",
        {
            "hidden_size": 2048,
            "intermediate_size": 7680,
            "num_hidden_layers": 7,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "sliding_window": 256,
        },
    ),
    "mamba2": (
        "granite-hybrid-dense",
        {
            "hidden_size": 1536,
            "shared_intermediate_size": 4096,
            "num_hidden_layers": 8,
            "layer_types": [f"{'full' if i == 5 else 'linear'}_attention" for i in range(8)],
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "mamba_n_heads": 48,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
        },
    ),
    "gpt-oss": (
        "gpt-oss",
        {
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 4,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 8,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "tie_word_embeddings": False,
        },
    ),
    "channel-delta-net": (
        "kimi-linear-plain",
        {key: value for key, value in LATENT.items() if key not in ("q_lora_rank", "n_routed_experts")}
        | {"num_local_experts": 16, "intermediate_size": 9216, "linear_num_heads": 16, "linear_head_dim": 128}
        | {"layer_types": ["linear_attention"] * 3 + ["full_attention"], "tie_word_embeddings": False},
    ),
    "mamba2-experts": (
        "nemotron-h-moe",
        {
            "hidden_size": 2688,
            "layers_block_type": [
                {"M": "linear_attention", "*": "full_attention", "E": "moe"}[kind] for kind in "MEMEM*EME"
            ],
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "mamba_num_heads": 64,
            "mamba_head_dim": 64,
            "ssm_state_size": 128,
            "n_groups": 8,
            "n_group": 1,
            "topk_group": 1,
            "n_routed_experts": 16,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1856,
            "moe_shared_expert_intermediate_size": 3712,
        },
    ),
    "xielu": (
        "apertus-plain",
        {
            "hidden_size": 4096,
            "intermediate_size": 21504,
            "num_hidden_layers": 3,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "tie_word_embeddings": False,
        },
    ),
    "chunked-attention-experts": (
        "llama4-published",
        {
            "hidden_size": 2048,
            "intermediate_size": 2048,
            "intermediate_size_mlp": 8192,
            "num_hidden_layers": 4,
            "interleave_moe_layer_step": 2,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_local_experts": 16,
        },
    ),
    "gated-heads-experts": (
        "laguna-published",
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 6,
            "num_attention_heads": 32,
            "num_attention_heads_per_layer": [32, 48, 48, 48, 32, 48],
            "num_key_value_heads": 8,
            "head_dim": 128,
            "sliding_window": 512,
            "num_experts": 16,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
    ),
}


def gguf_path(folder: Path, weights: str = "bf16") -> Path:
    """Return the path of the GGUF file beside a model's folder."""
    return folder.with_name(f"{folder.name}.{weights}.gguf")


def write_model(folder: Path, kind: str, sizes: dict[str, Any] | None = None) -> None:
    """Write a folder and, if GGUF has the family, the file beside it, with tokenizers of bytes; matrices are in bf16.

    The experts of gpt-oss are in MXFP4.

    Args:
        folder: folder to create.
        kind: one of ``KINDS``.
        sizes: fields of the configuration to change.
    """
    family, own = KINDS[kind]
    model = make_model(family, **(COMMON | own | (sizes or {}))).bfloat16()
    options: dict[str, gguf.GGMLQuantizationType] = {}
    if family == "gpt-oss":
        _save_packed(folder, model)
        options = dict.fromkeys(
            [f"ffn_{part}_exps" for part in ("gate", "up", "down")], gguf.GGMLQuantizationType.MXFP4
        )
    else:
        model.save_pretrained(folder)
    write_byte_tokenizer(folder)
    if model.config.model_type not in ARCHITECTURES:
        return
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pair = letters[0] + letters[1]
    unused = [f"<unused{i}>" for i in range(model.config.vocab_size - len(letters) - 1)]
    tokens = [*letters, pair, *unused]
    write_gguf(gguf_path(folder), model, options, matrices=gguf.GGMLQuantizationType.BF16, tokens=tokens)


def _save_packed(folder: Path, model: Any) -> None:
    """Write a folder of gpt-oss whose experts are in MXFP4."""
    model.save_pretrained(folder)
    tensors = dict(model.state_dict())
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        rows = tensors.pop(name).mT.float().contiguous()
        packed = torch.from_numpy(gguf.quantize(rows.numpy(), gguf.GGMLQuantizationType.MXFP4))
        blocks = packed.unflatten(-1, (-1, 17))
        # GGUF has the first 16 numbers of a group in the lower halves of its bytes, gpt-oss pairs of neighbours.
        halves = torch.cat([blocks[..., 1:] & 15, blocks[..., 1:] >> 4], -1)
        tensors[f"{name}_blocks"] = halves[..., ::2] | halves[..., 1::2] << 4
        tensors[f"{name}_scales"] = blocks[..., 0].clone()
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    save_file({name: values.contiguous() for name, values in tensors.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    (folder / "config.json").write_text(json.dumps(config))
