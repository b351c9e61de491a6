"""DFlash heads of random numbers in the formats that there are, and what they draft, in the obvious lines of torch."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from support import eagle_heads
from support.eagle_heads import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INNER,
    KV_HEADS,
    LAYER,
    VOCAB_SIZE,
    gguf_writer,
    rms_norm,
    rotate,
    write_folder,
    write_gguf,
)

DRAFT_VOCAB, MASK, BLOCK_SIZE = 101, 317, 4
GGUF_TOP = {**eagle_heads.GGUF_TOP, "hidden_norm": "enc.output_norm"}
GGUF_LAYER = {**eagle_heads.GGUF_LAYER, **{f"self_attn.{name}_norm": f"attn_{name}_norm" for name in "qk"}}


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
    kind = {"model_type": "qwen3", "num_hidden_layers": _num_layers(head)}
    kind |= {name: settings.pop(name) for name in ("model_type", "layer_types", "sliding_window") if name in settings}
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


def write_gguf_head(path: Path, head: dict[str, Tensor], layers: list[int], **settings: Any) -> Path:
    """Write a GGUF file as llama.cpp's converter does; ``settings`` are keys, without the architecture's name."""
    writer = gguf_writer(path.with_suffix(".gguf"), "dflash", _num_layers(head))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"<{token}>" for token in range(VOCAB_SIZE)])
    writer.add_mask_token_id(settings.get("mask", MASK))
    writer.add_uint32("dflash.block_size", settings.get("block_size", BLOCK_SIZE))
    writer.add_array("dflash.target_layers", [layer + 1 for layer in layers])
    if window := settings.get("sliding_window"):
        writer.add_sliding_window(window)
        writer.add_sliding_window_pattern(settings["sliding_window_pattern"])
    for name, values in head.items():
        if name == "d2t":
            writer.add_tensor(name, (values + torch.arange(len(values))).numpy())  # the tokens themselves
        elif name.startswith("layers."):
            _, index, part = name.removesuffix(".weight").split(".", 2)
            writer.add_tensor(f"blk.{index}.{GGUF_LAYER[part]}.weight", values.numpy())
        else:
            part = name.removesuffix(".weight")
            writer.add_tensor(f"{GGUF_TOP.get(part, part)}.weight", values.numpy())
    return write_gguf(writer)


def drafted_logits(
    head: dict[str, Tensor],
    outputs: list[Tensor],
    embedding: Tensor,
    lm_head: Tensor,
    token: int,
    num_drafts: int,
    *,
    windows: tuple[int, ...] = (),
    is_causal: bool = False,
    factors: tuple[float, float] = (1.0, 1.0),
    softcap: float = 0.0,
) -> Tensor:
    """Logits of a block's drafts, [num_drafts, vocab].

    Args:
        head: its tensors.
        outputs: outputs of the layers that it reads, each [tokens, hidden], for the text without its newest token.
        embedding, lm_head: [vocab, hidden], those of the model.
        token: the newest token.
        num_drafts: number of masks after it.
        windows: number of positions that a token sees in each layer, itself included; 0 for the whole text and block.
        is_causal: whether tokens of the block see none behind them in layers without a window, too.
        factors, softcap: factors of the embedding and of the logits, and the limit of the logits.
    """
    start = len(outputs[0])
    features = rms_norm(linear(torch.cat(outputs, dim=-1), head["fc.weight"]), head["hidden_norm.weight"])
    x = embedding[[token, *[MASK] * num_drafts]] * factors[0]
    ahead = torch.arange(start + 1 + num_drafts) - torch.arange(start, start + 1 + num_drafts)[:, None]
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
        window = windows[index] if windows else 0
        hidden = (ahead > 0) & bool(window or is_causal)
        if window:
            hidden |= ahead <= -window
        scores = torch.einsum("qhd,khd->hqk", q, k) * HEAD_DIM**-0.5
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        attended = torch.einsum("hqk,khd->qhd", weights, v).flatten(1)
        x = x + linear(attended, layer["self_attn.o_proj.weight"])
        normed = rms_norm(x, layer["post_attention_layernorm.weight"])
        inner = silu(linear(normed, layer["mlp.gate_proj.weight"])) * linear(normed, layer["mlp.up_proj.weight"])
        x = x + linear(inner, layer["mlp.down_proj.weight"])
    logits = linear(rms_norm(x[1:], head["norm.weight"]), head.get("lm_head.weight", lm_head)) * factors[1]
    return (logits / softcap).tanh() * softcap if softcap else logits


def _num_layers(head: dict[str, Tensor]) -> int:
    return sum(name.endswith("input_layernorm.weight") for name in head)
