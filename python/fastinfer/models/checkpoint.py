"""Interface of all checkpoint formats to the loader: tensors by the project's own names.

A layer has ``layers.3.q_proj`` (``k_``, ``v_``, ``o_``), ``layers.3.gate_proj`` (``up_``, ``down_``),
``layers.3.attention_norm``, ``layers.3.mlp_norm``, ``layers.3.post_attention_norm``, ``layers.3.post_mlp_norm``,
``layers.3.q_norm``, ``layers.3.k_norm``, ``layers.3.sinks``, ``layers.3.router``, ``layers.3.router_bias`` (of the
choice), ``layers.3.experts.5.gate_proj``, ``layers.3.shared_expert.gate_proj``, ``layers.3.shared_expert_gate`` and,
for a gate of attention's output, ``layers.3.output_gate``. Experts of projected hidden states have
``layers.3.experts_input`` and ``layers.3.experts_output``. An MLP with xIELU has ``layers.3.xielu_alpha_p``
(``_alpha_n``, ``_beta``, ``_eps``). A layer with linear attention has ``layers.3.in_proj_qkv`` (``_z``, ``_a``,
``_b``), perhaps second matrices ``layers.3.in_proj_z_up`` (``_a_up``), ``layers.3.conv1d``, ``layers.3.A_log``,
``layers.3.dt_bias``, ``layers.3.gated_norm`` and ``layers.3.out_proj``; one with a short convolution has
``layers.3.in_proj``, ``layers.3.conv1d`` and ``layers.3.out_proj``; a Mamba-2 layer also has ``layers.3.A_log``,
``layers.3.D``, ``layers.3.dt_bias`` and ``layers.3.gated_norm``. One with latent attention has ``layers.3.q_a_proj``,
``layers.3.q_a_norm``, ``layers.3.q_b_proj``, ``layers.3.kv_a_proj``, ``layers.3.kv_a_norm``, and ``layers.3.kv_b_proj``
or, already transposed and split, ``layers.3.k_b_proj`` and ``layers.3.v_b_proj``; its indexer has
``layers.3.index_q_proj``, ``layers.3.index_k_proj``, ``layers.3.index_k_norm`` and ``layers.3.index_weights``. Outside
the layers there are ``embedding``, ``norm``, ``lm_head``, ``position_embedding`` and ``rope_factors``. A bias is
``layers.3.q_proj.bias``.
"""

from collections import Counter
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fastinfer.errors import FastinferError
from fastinfer.formats.unpacked import Unpacked
from fastinfer.models.config import ModelConfig
from fastinfer.models.state_config import LinearAttentionConfig

# Matrices of which single rows are read. No operator does that with a look-up table's indices.
LOOKED_UP = ("embedding", "selector_predecessor", "selector_successor", "markov_w1")
# Factors of an xIELU, each of them a vector of one element.
XIELU_PARAMETERS = ("xielu_alpha_p", "xielu_alpha_n", "xielu_beta", "xielu_eps")
# Parts of the MLP, which some files store as a layer of its own.
MLP_PARTS = frozenset(
    (
        *("mlp_norm", "gate_proj", "up_proj", "down_proj", "router", "router_bias", "experts", "shared_expert"),
        *("experts_input", "experts_output"),
    )
)


class ModelPart(NamedTuple):
    """A part of a model that can be on a device of its own.

    Attributes:
        layer: number of the layer; ``None`` for what is in no layer.
        is_experts: whether these are the layer's routed experts, or all the rest.
    """

    layer: int | None
    is_experts: bool = False


class Checkpoint(Protocol):
    """An open checkpoint."""

    @property
    def path(self) -> Path:
        """Path of the file or folder."""
        ...

    @property
    def files(self) -> list[Path]:
        """Paths of all files on which the loaded model may depend."""
        ...

    @property
    def config(self) -> ModelConfig:
        """Sizes and constants of the model."""
        ...

    def weight_bytes(self, device: str) -> int:
        """Estimate the size of all weights that are loaded, in the form that they have in a device's memory."""
        ...

    def part_bytes(self, device: str) -> Counter[ModelPart]:
        """Estimate the sizes of which :meth:`weight_bytes` is the sum."""
        ...

    def __contains__(self, name: str) -> bool: ...

    def linear(self, name: str, out_features: int, in_features: int) -> Unpacked:
        """Read a matrix in the form in which it is stored.

        Raises:
            GGUFFormatError, CheckpointFormatError: the matrix is missing or has another shape.
            UnsupportedModelError: its form is not implemented.
        """
        ...

    def parts(self, name: str, out_features: int, in_features: int) -> Iterator[Unpacked]:
        """Read a matrix in consecutive parts of its rows, so that not all of it is in memory unpacked.

        A format may return the whole matrix as one part.

        Raises:
            GGUFFormatError, CheckpointFormatError, UnsupportedModelError: as for :meth:`linear`.
        """
        ...

    def vector(self, name: str, size: int) -> Tensor:
        """Read the weight of a norm, a bias or another vector, as [size] fp32.

        Raises:
            GGUFFormatError, CheckpointFormatError: the vector is missing or has another shape.
            UnsupportedModelError: it is quantised.
        """
        ...

    def draft_tokens(self) -> Tensor | None:
        """Read the token of each row of the output layer, [draft_vocab_size] int64; ``None`` if row i is token i.

        Raises:
            CheckpointFormatError: the tensor is missing, or its tokens are out of range or not all different.
        """
        ...

    def layout(self, layer: int) -> Hashable:
        """Return names, shapes and types of a layer's tensors; layers with equal layouts take the same memory."""
        ...

    def unread(self) -> list[str]:
        """Return the names, in the file, of its layers' tensors that have not been read.

        Empty for a format whose files have tensors that a model does not need.
        """
        ...

    def release(self) -> None:
        """Free the memory of data that was read."""
        ...


def fused_rows(config: ModelConfig, layer: int, part: str, inner: int | None = None) -> slice:
    """Return the rows of a part in a layer's fused matrix, of Q, K and V or of gate and up, that some files store.

    Gate and up have ``inner`` rows each, or as many as the layer's MLP is wide.
    """
    q_size, kv_size = config.q_size(layer), config.kv_size(layer)
    inner = inner or config.mlp_size(layer)
    gate, up = slice(0, inner), slice(inner, 2 * inner)
    if config.alternating_gate_up:
        gate, up = slice(0, 2 * inner, 2), slice(1, 2 * inner, 2)
    return {
        "q_proj": slice(0, q_size),
        "k_proj": slice(q_size, q_size + kv_size),
        "v_proj": slice(q_size + kv_size, q_size + kv_size + config.value_size(layer)),
        "gate_proj": gate,
        "up_proj": up,
    }[part]


def rows_by_head(config: ModelConfig, layer: int, part: str) -> Tensor:
    """Return the rows of Q, K or V in a layer's fused matrix that has those of each head together, as GPT-NeoX's."""
    heads = torch.arange(3 * config.q_size(layer)).view(config.num_heads, 3, -1)
    return heads[:, ("q_proj", "k_proj", "v_proj").index(part)].flatten()


def check_draft_tokens(tokens: Tensor, vocab_size: int, place: str, error: type[FastinferError]) -> None:
    """Check the tokens of the rows of an output layer, [draft_vocab_size] int64.

    Args:
        tokens: the token of each row.
        vocab_size: number of tokens of the whole vocabulary.
        place: where they are stored, for messages.
        error: class of the error that is raised.

    Raises:
        FastinferError: a token is out of range, or belongs to several rows.
    """
    outside = (tokens < 0) | (tokens >= vocab_size)
    if outside.any():
        row = int(outside.nonzero()[0])
        raise error(f"{place} must give tokens in 0..{vocab_size - 1}, got {int(tokens[row])} for row {row}")
    known, counts = tokens.unique(return_counts=True)
    if len(known) < len(tokens):
        got = f"{int(known[counts.argmax()])} {int(counts.max())} times"
        raise error(f"{place} must give each row another token, got {got}")


def rows_by_key_head(sizes: LinearAttentionConfig, part: str) -> Tensor:
    """Return the rows of a part of linear attention in a fused matrix whose rows are ordered by key head.

    Qwen3-Next stores two such matrices. For each key head one has its query and key, and the values and gates of its
    value heads; the other has ``b`` and ``a`` of its value heads.
    """
    key_heads, key_dim = sizes.num_key_heads, sizes.key_dim
    heads = sizes.num_value_heads // key_heads
    if part in ("in_proj_qkv", "in_proj_z"):
        widths = [key_dim, key_dim, heads * sizes.value_dim, heads * sizes.value_dim]
    else:
        widths = [heads, heads]
    rows = torch.arange(key_heads * sum(widths)).view(key_heads, -1).split(widths, dim=1)
    chosen = {"in_proj_qkv": rows[:3], "in_proj_z": rows[3:], "in_proj_b": rows[:1], "in_proj_a": rows[1:]}[part]
    return torch.cat([piece.flatten() for piece in chosen])


def tiled_rows(sizes: LinearAttentionConfig, width: int) -> Tensor:
    """Return, for each of ``width`` rows of all value heads, the row in files that have the heads in another order.

    Here value heads of a key head are neighbours. In GGUF files of Qwen3.5 the first value head of every key head comes
    first, then the second of every key head, and so on.

    Returns:
        [num_value_heads * width] int64.
    """
    shape = sizes.num_value_heads // sizes.num_key_heads, sizes.num_key_heads, width
    return torch.arange(sizes.num_value_heads * width).view(shape).transpose(0, 1).flatten()


def stored_layer(config: ModelConfig, layer: int, part: str) -> int:
    """Return the number of the file's layer that has a part."""
    if not config.stored_layers:
        return layer
    attention, mlp = config.stored_layers[layer]
    if part not in MLP_PARTS:
        return attention
    assert mlp is not None
    return mlp


def decoder_layers(config: ModelConfig) -> dict[int, int]:
    """Return for each of the file's layers the decoder's first layer that has a part of it."""
    if not config.stored_layers:
        return {layer: layer for layer in range(config.num_layers)}
    pairs = reversed(list(enumerate(config.stored_layers)))
    return {stored: layer for layer, parts in pairs for stored in parts if stored is not None}


def is_state_part(part: str) -> bool:
    """Return whether a projection belongs to layers with a state instead of keys and values."""
    return part.startswith(("in_proj", "out_proj"))


def split_name(name: str) -> tuple[int, str, str]:
    """Split a name into layer, part and rest: ``layers.3.experts.5.up_proj`` gives (3, "experts", "5.up_proj")."""
    _, layer, part, *rest = name.split(".", 3)
    return int(layer), part, rest[0] if rest else ""


def expert_index(name: str) -> int | None:
    """Return the index of an expert from the name of one of its matrices; ``None`` for another name."""
    return int(split_name(name)[2].partition(".")[0]) if ".experts." in name else None
