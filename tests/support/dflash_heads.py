"""DFlash heads of random numbers in the formats that there are, and what they draft, in the obvious lines of torch."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from support.eagle_heads import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    LAYER,
    VOCAB_SIZE,
    rms_norm,
    rotate,
    write_folder,
)

DRAFT_VOCAB, MASK, BLOCK_SIZE = 101, 317, 4


def random_head(num_features: int, num_layers: int = 2, *, seed: int = 1, **settings: Any) -> dict[str, Tensor]:
    """Tensors of a head; ``settings`` are those of config.json."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * 1.5 / columns**0.5

    def norm(size: int) -> Tensor:
        return 1 + torch.randn(size, generator=generator) / 10

    head = {
        "fc.weight": matrix(HIDDEN, num_features * HIDDEN),
        "hidden_norm.weight": norm(HIDDEN),
        "norm.weight": norm(HIDDEN),
    }
    for index in range(num_layers):
        layer = f"layers.{index}"
        head |= {
            f"{layer}.input_layernorm.weight": norm(HIDDEN),
            f"{layer}.post_attention_layernorm.weight": norm(HIDDEN),
            f"{layer}.self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM),
            f"{layer}.mlp.gate_proj.weight": matrix(INNER, HIDDEN),
            f"{layer}.mlp.up_proj.weight": matrix(INNER, HIDDEN),
            f"{layer}.mlp.down_proj.weight": matrix(HIDDEN, INNER),
        }
        if settings.get("model_type", "qwen3") == "qwen3":
            head |= {f"{layer}.self_attn.{name}_norm.weight": norm(HEAD_DIM) for name in "qk"}
    if size := settings.get("draft_vocab_size"):
        tokens = torch.randperm(VOCAB_SIZE, generator=generator)[:size].sort().values
        head |= {"lm_head.weight": matrix(size, HIDDEN), "d2t": tokens - torch.arange(size)}
    return head


def write_own(folder: Path, head: dict[str, Tensor], layers: list[int], **settings: Any) -> Path:
    """Write a folder as the authors of DFlash do; ``layers`` are those whose outputs are read."""
    config = {"architectures": ["DFlashDraftModel"], "block_size": BLOCK_SIZE, "model_type": "qwen3"}
    own = {"dflash_config": {"mask_token_id": MASK, "target_layer_ids": layers}}
    return write_folder(folder, head, LAYER | {"num_hidden_layers": _num_layers(head)} | config | own | settings)


def write_speculators(folder: Path, head: dict[str, Tensor], layers: list[int], **settings: Any) -> Path:
    """Write a folder as speculators does."""
    kind = {"model_type": settings.pop("model_type", "qwen3"), "num_hidden_layers": _num_layers(head)}
    config = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "transformer_layer_config": LAYER | kind,
        "draft_vocab_size": VOCAB_SIZE,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in layers],
        "mask_token_id": MASK,
        "block_size": BLOCK_SIZE,
        "sample_from_anchor": False,
    }
    return write_folder(folder, head, config | settings)


def drafted_logits(
    head: dict[str, Tensor], outputs: list[Tensor], embedding: Tensor, lm_head: Tensor, token: int, num_drafts: int
) -> Tensor:
    """Logits of a block's drafts, [num_drafts, vocab].

    Args:
        head: its tensors.
        outputs: outputs of the layers that it reads, each [tokens, hidden], for the text without its newest token.
        embedding, lm_head: [vocab, hidden], those of the model.
        token: the newest token.
        num_drafts: number of masks after it.
    """
    start = len(outputs[0])
    features = rms_norm(linear(torch.cat(outputs, dim=-1), head["fc.weight"]), head["hidden_norm.weight"])
    x = embedding[[token, *[MASK] * num_drafts]]
    for index in range(_num_layers(head)):
        layer = {name.removeprefix(f"layers.{index}."): values for name, values in head.items()}
        normed = rms_norm(x, layer["input_layernorm.weight"])
        q = linear(normed, layer["self_attn.q_proj.weight"]).unflatten(1, (HEADS, HEAD_DIM))
        both = torch.cat([features, normed])
        k = linear(both, layer["self_attn.k_proj.weight"]).unflatten(1, (KV_HEADS, HEAD_DIM))
        v = linear(both, layer["self_attn.v_proj.weight"]).unflatten(1, (KV_HEADS, HEAD_DIM))
        if "self_attn.q_norm.weight" in layer:
            q, k = rms_norm(q, layer["self_attn.q_norm.weight"]), rms_norm(k, layer["self_attn.k_norm.weight"])
        q, k = rotate(q, start), rotate(k, 0)
        k, v = (part.repeat_interleave(HEADS // KV_HEADS, dim=1) for part in (k, v))
        weights = (torch.einsum("qhd,khd->hqk", q, k) * HEAD_DIM**-0.5).softmax(-1)  # nothing is hidden
        attended = torch.einsum("hqk,khd->qhd", weights, v).flatten(1)
        x = x + linear(attended, layer["self_attn.o_proj.weight"])
        normed = rms_norm(x, layer["post_attention_layernorm.weight"])
        inner = silu(linear(normed, layer["mlp.gate_proj.weight"])) * linear(normed, layer["mlp.up_proj.weight"])
        x = x + linear(inner, layer["mlp.down_proj.weight"])
    return linear(rms_norm(x[1:], head["norm.weight"]), head.get("lm_head.weight", lm_head))


def _num_layers(head: dict[str, Tensor]) -> int:
    return sum(name.endswith("input_layernorm.weight") for name in head)
