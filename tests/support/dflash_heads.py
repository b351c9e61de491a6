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
# What config.json says of a head of DFlash2.
TAPS, GROUP_SIZE, RANK, TOP_K = 3, 4, 24, 7
SECOND = {"conv_kernel_size": TAPS, "conv_group_size": GROUP_SIZE, "selector_rank": RANK, "selector_top_k": TOP_K}
# What it says of a head of DSpark.
MARKOV = {"markov_rank": RANK, "markov_head_type": "vanilla", "enable_confidence_head": True}
CODEBOOKS = tuple(f"candidate_selector.{name}_codebook" for name in ("predecessor", "successor"))
CONVS = ("attention_conv", "mlp_conv")
GGUF_TOP = {
    **eagle_heads.GGUF_TOP,
    "hidden_norm": "enc.output_norm",
    "candidate_selector.hidden_projection": "selector_hidden",
    **{name: f"selector_{name.split('.')[1].removesuffix('_codebook')}" for name in CODEBOOKS},
    **{f"markov_head.markov_w{number}": f"markov_w{number}" for number in (1, 2)},
    "confidence_head.proj": "conf_proj",
}
GGUF_LAYER = {
    **eagle_heads.GGUF_LAYER,
    **{f"self_attn.{name}_norm": f"attn_{name}_norm" for name in "qk"},
    "self_attn.attention_sink_bias": "attn_sinks",
    **{f"{conv}.base_kernel": f"{stored}_conv_base" for conv, stored in zip(CONVS, ("attn", "ffn"), strict=True)},
    **{f"{conv}.kernel_projection": f"{stored}_conv_proj" for conv, stored in zip(CONVS, ("attn", "ffn"), strict=True)},
}


def random_head(num_features: int, num_layers: int = 2, *, seed: int = 1, **settings: Any) -> dict[str, Tensor]:
    """Tensors of a head; ``settings`` are those of config.json, with ``SECOND`` or ``MARKOV`` for another kind."""
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
        if settings.get("attention_sink_bias"):
            head[f"{layer}.self_attn.attention_sink_bias"] = torch.randn(HEADS, generator=generator) + 2
        if "conv_kernel_size" in settings:
            head |= {
                f"{layer}.{conv}.base_kernel": matrix(2 * TAPS, HIDDEN).view(2, TAPS, HIDDEN) * 4 for conv in CONVS
            }
            rows = 2 * TAPS * HIDDEN // GROUP_SIZE
            head |= {f"{layer}.{conv}.kernel_projection.weight": matrix(rows, HIDDEN) / 4 for conv in CONVS}
    if "selector_rank" in settings:
        head |= {name: matrix(VOCAB_SIZE, RANK) * RANK**0.5 for name in CODEBOOKS}
        head["candidate_selector.hidden_projection.weight"] = matrix(RANK, HIDDEN)
    if "markov_rank" in settings:
        head |= {
            "markov_head.markov_w1.weight": matrix(VOCAB_SIZE, RANK) * RANK**0.5,
            "markov_head.markov_w2.weight": matrix(settings.get("draft_vocab_size", VOCAB_SIZE), RANK),
            "confidence_head.proj.weight": matrix(1, HIDDEN + RANK),
        }
    if size := settings.get("draft_vocab_size"):
        tokens = torch.randperm(VOCAB_SIZE, generator=generator)[:size].sort().values
        head |= {"lm_head.weight": matrix(size, HIDDEN), "d2t": tokens - torch.arange(size)}
    return head


def write_own(folder: Path, head: dict[str, Tensor], layers: list[int], **settings: Any) -> Path:
    """Write a folder as the authors of DFlash do; ``layers`` are those whose outputs are read."""
    config = {"architectures": ["DFlashDraftModel"], "block_size": BLOCK_SIZE, "model_type": "qwen3"}
    own = {"dflash_config": {"mask_token_id": MASK, "target_layer_ids": layers}}
    if "selector_rank" in settings:  # all of these in one place, as in published heads
        config["architectures"] = ["DFlash2DraftModel"]
        own["dflash_config"] |= {"block_size": config.pop("block_size")} | {key: settings.pop(key) for key in SECOND}
    return write_folder(folder, head, LAYER | {"num_hidden_layers": _num_layers(head)} | config | own | settings)


def write_deepspec(folder: Path, head: dict[str, Tensor], layers: list[int], **settings: Any) -> Path:
    """Write a folder with a head of DSpark as DeepSpec does."""
    config = {"architectures": ["Qwen3DSparkModel"], "block_size": BLOCK_SIZE, "model_type": "qwen3"}
    own = {"mask_token_id": MASK, "target_layer_ids": layers, "num_hidden_layers": _num_layers(head)}
    return write_folder(folder, head, LAYER | config | own | settings)


def write_speculators(folder: Path, head: dict[str, Tensor], layers: list[int], **settings: Any) -> Path:
    """Write a folder as speculators does."""
    kind = {"model_type": "qwen3", "num_hidden_layers": _num_layers(head)}
    kind |= {name: settings.pop(name) for name in ("model_type", "layer_types", "sliding_window") if name in settings}
    name, algorithm = "DFlashSpeculator", "dflash"
    if "selector_rank" in settings:
        name, algorithm = "DFlash2DraftModel", "dflash2"
    elif "markov_rank" in settings:
        name, algorithm = "DSparkSpeculator", "dspark"
    config = {
        "architectures": [name],
        "speculators_model_type": algorithm,
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
    for key in SECOND:
        if key in settings:
            writer.add_uint32(f"dflash.{key}", settings[key])
    if "sample_from_anchor" in settings:
        writer.add_bool("dflash.sample_from_anchor", settings["sample_from_anchor"])
    for name, values in head.items():
        if name == "d2t":
            writer.add_tensor(name, (values + torch.arange(len(values))).numpy())  # the tokens themselves
        elif name.startswith("layers."):
            _, index, part = name.removesuffix(".weight").split(".", 2)
            suffix = "" if part.endswith(".base_kernel") else ".weight"
            writer.add_tensor(f"blk.{index}.{GGUF_LAYER[part]}{suffix}", values.numpy())
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
    whole_windows: bool = False,
    drafts_next: bool = False,
    factors: tuple[float, float] = (1.0, 1.0),
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Logits of a block's drafts, [num_drafts, vocab], and the hidden states that they are computed from.

    Args:
        head: its tensors.
        outputs: outputs of the layers that it reads, each [tokens, hidden], for the text without its newest token.
        embedding, lm_head: [vocab, hidden], those of the model.
        token: the newest token.
        num_drafts: number of drafts.
        windows: number of positions that a token sees in each layer, itself included; 0 for the whole text and block.
        is_causal: whether tokens of the block see none behind them in layers without a window, too.
        whole_windows: whether they see the whole block in layers with a window, which then ends with the block.
        drafts_next: whether the newest token gives the first draft, instead of the mask after it.
        factors, softcap: factors of the embedding and of the logits, and the limit of the logits.
    """
    start, num_masks = len(outputs[0]), num_drafts - drafts_next
    features = rms_norm(linear(torch.cat(outputs, dim=-1), head["fc.weight"]), head["hidden_norm.weight"])
    x = embedding[[token, *[MASK] * num_masks]] * factors[0]
    ahead = torch.arange(start + 1 + num_masks) - torch.arange(start, start + 1 + num_masks)[:, None]
    for index in range(_num_layers(head)):
        layer = {
            name.removeprefix(f"layers.{index}."): values for name, values in head.items() if f"layers.{index}." in name
        }
        normed = rms_norm(x, layer["input_layernorm.weight"])
        source = _convolved(layer, "attention_conv", 0, normed, normed)
        q = linear(source, layer["self_attn.q_proj.weight"]).unflatten(1, (HEADS, HEAD_DIM))
        both = torch.cat([features, source])
        k = linear(both, layer["self_attn.k_proj.weight"]).unflatten(1, (KV_HEADS, HEAD_DIM))
        v = linear(both, layer["self_attn.v_proj.weight"]).unflatten(1, (KV_HEADS, HEAD_DIM))
        if "self_attn.q_norm.weight" in layer:
            q, k = rms_norm(q, layer["self_attn.q_norm.weight"]), rms_norm(k, layer["self_attn.k_norm.weight"])
        q, k = rotate(q, start), rotate(k, 0)
        k, v = (part.repeat_interleave(HEADS // KV_HEADS, dim=1) for part in (k, v))
        window = windows[index] if windows else 0
        hidden = (ahead > 0) & bool((window and not whole_windows) or is_causal)
        if window:
            hidden |= (ahead[-1:] if whole_windows else ahead) <= -window
        scores = torch.einsum("qhd,khd->hqk", q, k) * HEAD_DIM**-0.5
        scores = scores.masked_fill(hidden, -torch.inf)
        if (sinks := layer.get("self_attn.attention_sink_bias")) is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(x), 1)], dim=-1)
        weights = scores.softmax(-1)[..., : len(k)]
        attended = linear(torch.einsum("hqk,khd->qhd", weights, v).flatten(1), layer["self_attn.o_proj.weight"])
        x = x + _convolved(layer, "attention_conv", 1, attended, normed)
        normed = rms_norm(x, layer["post_attention_layernorm.weight"])
        source = _convolved(layer, "mlp_conv", 0, normed, normed)
        inner = silu(linear(source, layer["mlp.gate_proj.weight"])) * linear(source, layer["mlp.up_proj.weight"])
        x = x + _convolved(layer, "mlp_conv", 1, linear(inner, layer["mlp.down_proj.weight"]), normed)
    last = rms_norm(x[-num_drafts:], head["norm.weight"])
    logits = linear(last, head.get("lm_head.weight", lm_head)) * factors[1]
    return (logits / softcap).tanh() * softcap if softcap else logits, last


def chosen_drafts(head: dict[str, Tensor], logits: Tensor, hidden: Tensor, token: int) -> list[int]:
    """Drafts that a head chooses one after the other, without noise.

    Args:
        head: its tensors.
        logits, hidden: what :func:`drafted_logits` returns.
        token: the newest token.
    """
    drafts = [token]
    for place, row in enumerate(logits):
        scores = {index: float(value) for index, value in enumerate(row)}
        if CODEBOOKS[0] in head:  # DFlash2 chooses among the likeliest tokens
            before, after = (head[name] for name in CODEBOOKS)
            context = before[drafts[-1]] * (head["candidate_selector.hidden_projection.weight"] @ hidden[place])
            scores = {int(index): float(row[index] + after[index] @ context) for index in row.argsort()[-TOP_K:]}
        elif "markov_head.markov_w1.weight" in head:
            vector = head["markov_head.markov_w1.weight"][drafts[-1]]
            scores = dict(enumerate((row + head["markov_head.markov_w2.weight"] @ vector).tolist()))
        best = max(scores, key=lambda index: scores[index])
        drafts.append(best + int(head["d2t"][best]) if "d2t" in head else best)
    return drafts[1:]


def _convolved(layer: dict[str, Tensor], name: str, side: int, x: Tensor, source: Tensor) -> Tensor:
    """Convolve the tokens of a block, [tokens, hidden], with kernels that follow from ``source``, if the head does."""
    if f"{name}.base_kernel" not in layer:
        return x
    base, result = layer[f"{name}.base_kernel"], torch.zeros_like(x)
    rows = linear(source, layer[f"{name}.kernel_projection.weight"])
    for token in range(len(x)):
        shared = rows[token].view(2, TAPS, HIDDEN // GROUP_SIZE).repeat_interleave(GROUP_SIZE, dim=2)
        for tap in range(min(TAPS, token + 1)):
            result[token] += (base[side, tap] + shared[side, tap]) * x[token - tap]
    return result


def _num_layers(head: dict[str, Tensor]) -> int:
    return sum(name.endswith("input_layernorm.weight") for name in head)
