"""What the loader asks of a checkpoint, whatever its format: tensors by the project's own names.

Of a layer: ``layers.3.q_proj`` (k, v, o), ``layers.3.gate_proj`` (up, down), ``layers.3.attention_norm``,
``layers.3.mlp_norm``, ``layers.3.post_attention_norm``, ``layers.3.post_mlp_norm``, ``layers.3.q_norm``,
``layers.3.k_norm``, ``layers.3.router``, ``layers.3.experts.5.gate_proj``; besides these ``embedding``, ``norm``,
``lm_head``, ``position_embedding`` and ``rope_factors``. A bias is ``layers.3.q_proj.bias``.
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
    def path(self) -> Path: ...

    @property
    def config(self) -> ModelConfig: ...

    def __contains__(self, name: str) -> bool: ...

    def linear(self, name: str, out_features: int, in_features: int) -> Unpacked:
        """A matrix in the form in which it is stored.

        Raises:
            GGUFFormatError, CheckpointFormatError: it is missing or has another shape.
            UnsupportedModelError: its form is not implemented.
        """
        ...

    def parts(self, name: str, out_features: int, in_features: int) -> Iterator[Unpacked]:
        """:meth:`linear` in runs of its rows, if it is quantised, so that not all of it is in memory unpacked.

        Raises:
            GGUFFormatError, CheckpointFormatError, UnsupportedModelError: as :meth:`linear`.
        """
        ...

    def vector(self, name: str, size: int) -> Tensor:
        """A norm's weight, or a bias, [size] fp32."""
        ...

    def layout(self, layer: int) -> Hashable:
        """Names, shapes and types of a layer's tensors, from the header: layers with the same take the same memory."""
        ...

    def release(self) -> None:
        """Give the memory of what was read back."""
        ...


def fused_rows(config: ModelConfig, part: str) -> slice:
    """Where a part lies in the matrix of Q, K and V, or of gate and up, of files that store these as one."""
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
    """``layers.3.experts.5.up_proj`` as layer, part and what follows: (3, "experts", "5.up_proj")."""
    _, layer, part, *rest = name.split(".", 3)
    return int(layer), part, rest[0] if rest else ""
