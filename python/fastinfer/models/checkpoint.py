"""Interface of all checkpoint formats to the loader: tensors by the project's own names.

A layer has ``layers.3.q_proj`` (``k_``, ``v_``, ``o_``), ``layers.3.gate_proj`` (``up_``, ``down_``),
``layers.3.attention_norm``, ``layers.3.mlp_norm``, ``layers.3.post_attention_norm``, ``layers.3.post_mlp_norm``,
``layers.3.q_norm``, ``layers.3.k_norm``, ``layers.3.router`` and ``layers.3.experts.5.gate_proj``. Outside the layers
there are ``embedding``, ``norm``, ``lm_head``, ``position_embedding`` and ``rope_factors``. A bias is
``layers.3.q_proj.bias``.
"""

from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Protocol

from torch import Tensor

from fastinfer.formats.unpacked import Unpacked
from fastinfer.models.config import ModelConfig


class Checkpoint(Protocol):
    """An open checkpoint."""

    @property
    def path(self) -> Path:
        """Path of the file or folder."""
        ...

    @property
    def config(self) -> ModelConfig:
        """Sizes and constants of the model."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Size of all weights in the file or folder."""
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
        """Read the weight of a norm, or a bias, as [size] fp32.

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

    def release(self) -> None:
        """Free the memory of data that was read."""
        ...


def fused_rows(config: ModelConfig, part: str) -> slice:
    """Return the rows of a part in a fused matrix of Q, K and V, or of gate and up, as some files store them."""
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    inner = config.intermediate_size
    return {
        "q_proj": slice(0, q_size),
        "k_proj": slice(q_size, q_size + kv_size),
        "v_proj": slice(q_size + kv_size, q_size + 2 * kv_size),
        "gate_proj": slice(0, inner),
        "up_proj": slice(inner, 2 * inner),
    }[part]


def split_name(name: str) -> tuple[int, str, str]:
    """Split a name into layer, part and rest: ``layers.3.experts.5.up_proj`` gives (3, "experts", "5.up_proj")."""
    _, layer, part, *rest = name.split(".", 3)
    return int(layer), part, rest[0] if rest else ""
