"""EAGLE-3 heads of random numbers in the formats that there are, and what they draft, in the obvious lines of torch."""

import json
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention, silu

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 4, 2, 32
VOCAB_SIZE, DRAFT_VOCAB = 320, 97
EPS, THETA = 1e-5, 500.0
LAYER = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 16,  # less than any text has: a head's own limit does not count
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}

GGUF_TOP = {"fc": "fc", "embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
GGUF_LAYER = {
    "input_layernorm": "attn_norm",
    "hidden_norm": "attn_norm_2",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{name}_proj": f"attn_{name}" for name in "qkv"},
    "self_attn.o_proj": "attn_output",
    **{f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
}


def random_head(num_aux: int = 3, *, seed: int = 1, **settings: Any) -> dict[str, Tensor]:
    """Tensors of a head, by speculators' names; ``settings`` are those of config.json."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * 1.5 / columns**0.5

    def norm(size: int) -> Tensor:
        return 1 + torch.randn(size, generator=generator) / 10

    tokens = torch.randperm(VOCAB_SIZE, generator=generator)[:DRAFT_VOCAB].sort().values
    head = {
        "fc.weight": matrix(HIDDEN, num_aux * HIDDEN),
        "embed_tokens.weight": matrix(VOCAB_SIZE, HIDDEN),
        "layers.0.input_layernorm.weight": norm(HIDDEN),
        "layers.0.hidden_norm.weight": norm(HIDDEN),
        "layers.0.post_attention_layernorm.weight": norm(HIDDEN),
        "layers.0.self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, 2 * HIDDEN),
        "layers.0.self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, 2 * HIDDEN),
        "layers.0.self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, 2 * HIDDEN),
        "layers.0.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM),
        "layers.0.mlp.gate_proj.weight": matrix(INNER, HIDDEN),
        "layers.0.mlp.up_proj.weight": matrix(INNER, HIDDEN),
        "layers.0.mlp.down_proj.weight": matrix(HIDDEN, INNER),
        "norm.weight": norm(HIDDEN),
        "lm_head.weight": matrix(DRAFT_VOCAB, HIDDEN),
        "d2t": tokens - torch.arange(DRAFT_VOCAB),
        "t2d": torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill(0, tokens, True),
    }
    if settings.get("norm_before_fc"):
        head["input_norm.weight"] = norm(num_aux * HIDDEN)
    if settings.get("fc_norm"):
        head |= {f"fc_norm.{index}.weight": norm(HIDDEN) for index in range(num_aux)}
    if settings.get("model_type") == "qwen3":
        head |= {f"layers.0.self_attn.{name}_norm.weight": norm(HEAD_DIM) for name in "qk"}
    return head


def write_speculators(folder: Path, head: dict[str, Tensor], **settings: Any) -> Path:
    """Write a folder as speculators does."""
    layer = LAYER | {name: settings.pop(name) for name in ("model_type",) if name in settings}
    config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": len(head["lm_head.weight"]),
        "transformer_layer_config": layer,
    }
    return write_folder(folder, head, config | settings)


def write_specforge(folder: Path, head: dict[str, Tensor], **settings: Any) -> Path:
    """Write a folder as SpecForge does."""
    renamed = {name.replace("layers.0.", "midlayer."): values for name, values in head.items()}
    config = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(head["lm_head.weight"])}
    return write_folder(folder, renamed, LAYER | config | settings)


def write_gguf_head(path: Path, head: dict[str, Tensor], **settings: Any) -> Path:
    """Write a GGUF file as llama.cpp's converter does."""
    writer = gguf_writer(path.with_suffix(".gguf"), "eagle3", 1)
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(VOCAB_SIZE)
    writer.add_array("eagle3.extract_layers", settings["extract_layers"])
    writer.add_uint32("eagle3.target_hidden_size", settings.get("target_hidden_size", HIDDEN))
    writer.add_bool("eagle3.norm_before_residual", settings.get("norm_before_residual", False))
    names = {f"layers.0.{part}": f"blk.0.{stored}" for part, stored in GGUF_LAYER.items()} | GGUF_TOP
    for name, values in head.items():
        if name.startswith("layers.0.self_attn.") and name.split(".")[3] in ("q_proj", "k_proj"):
            pairs = values.unflatten(0, (-1, 2, HEAD_DIM // 2))
            values = pairs.transpose(1, 2).flatten(0, 2)
        if name == "d2t":
            values = values + torch.arange(len(values))  # the tokens themselves
        if name != "t2d":
            part, dot, kind = name.rpartition(".")
            writer.add_tensor(f"{names[part]}.{kind}" if dot else name, values.contiguous().numpy())
    return write_gguf(writer)


def gguf_writer(path: Path, architecture: str, num_layers: int) -> gguf.GGUFWriter:
    """Begin a GGUF file with the sizes of a head's layers."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(num_layers)
    writer.add_context_length(LAYER["max_position_embeddings"])
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(THETA)
    writer.add_layer_norm_rms_eps(EPS)
    return writer


def write_gguf(writer: gguf.GGUFWriter) -> Path:
    """End a GGUF file, and return its path."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert writer.path is not None
    return writer.path


def write_folder(folder: Path, head: dict[str, Tensor], config: dict[str, Any]) -> Path:
    """Write a folder with these tensors and this config.json."""
    folder.mkdir()
    save_file(head, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def drafted_logits(
    head: dict[str, Tensor], aux: list[Tensor], tokens: list[int], num_drafts: int, **settings: Any
) -> Tensor:
    """Logits [draft_vocab] after a text whose last tokens are drafts.

    Args:
        head: tensors of the head.
        aux: [n, hidden] each, hidden states of the model at all tokens before the last one that is no draft.
        tokens: the text.
        num_drafts: number of drafts.
        settings: settings of config.json.
    """
    if settings.get("fc_norm"):
        aux = [rms_norm(x, head[f"fc_norm.{index}.weight"]) for index, x in enumerate(aux)]
    joined = torch.cat(aux, -1)
    if settings.get("norm_before_fc"):
        joined = rms_norm(joined, head["input_norm.weight"])
    features = linear(joined, head["fc.weight"])
    features = torch.cat([features[:1], features])  # the first token reads its own
    for count in range(len(tokens) - num_drafts, len(tokens) + 1):
        out = _layer(head, features, torch.tensor(tokens[:count]), settings)
        normed = rms_norm(out, head["norm.weight"])
        features = torch.cat([features, (normed if settings.get("norm_output") else out)[-1:]])
    return linear(normed[-1], head["lm_head.weight"])


def _layer(head: dict[str, Tensor], features: Tensor, tokens: Tensor, settings: dict[str, Any]) -> Tensor:
    layer = {name.removeprefix("layers.0.").removesuffix(".weight"): values for name, values in head.items()}
    normed = rms_norm(features, layer["hidden_norm"])
    x = torch.cat([rms_norm(head["embed_tokens.weight"][tokens], layer["input_layernorm"]), normed], -1)
    q, k, v = (linear(x, layer[f"self_attn.{name}_proj"]).unflatten(-1, (-1, HEAD_DIM)) for name in "qkv")
    if settings.get("model_type") == "qwen3":
        q, k = rms_norm(q, layer["self_attn.q_norm"]), rms_norm(k, layer["self_attn.k_norm"])
    q, k, v = (part.transpose(0, 1) for part in (rotate(q), rotate(k), v))
    out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1).flatten(1)
    x = (normed if settings.get("norm_before_residual") else features) + linear(out, layer["self_attn.o_proj"])
    normed = rms_norm(x, layer["post_attention_layernorm"])
    inner = silu(linear(normed, layer["mlp.gate_proj"])) * linear(normed, layer["mlp.up_proj"])
    return x + linear(inner, layer["mlp.down_proj"])


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * weight


def rotate(x: Tensor, first: int = 0) -> Tensor:
    half = HEAD_DIM // 2
    angles = torch.arange(first, first + len(x))[:, None] * THETA ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x.split(half, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
