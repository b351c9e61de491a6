"""Rotary position embedding module with a precomputed table, instead of cosines and sines computed in every step."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fastinfer.nn.exact_buffers import ExactBuffers


class RotaryEmbedding(ExactBuffers):
    """Module that transformers' decoders call to get their ``position_embeddings``, in the form for :class:`Attention`.

    Args:
        tables: [max_position, rotary_dim] fp32 table of :func:`fastinfer.ops.cos_sin_cache`, or a mapping from types of
            layers to their tables.
    """

    def __init__(self, tables: Tensor | Mapping[str | None, Tensor]) -> None:
        super().__init__()
        by_type = {None: tables} if isinstance(tables, Tensor) else tables
        self._names = {layer_type: f"{layer_type or 'cos_sin'}_cache" for layer_type in by_type}
        for layer_type, table in by_type.items():
            self.register_buffer(self._names[layer_type], table, persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
        """Return the table and the positions of the tokens.

        Args:
            x: [batch, length, ...]; only its shape is used.
            position_ids: [1 or batch, length] int64, below the table's ``max_position``.
            layer_type: type of layer whose table is returned.

        Returns:
            [max_position, rotary_dim] fp32 and [batch * length] int64.
        """
        table: Tensor = getattr(self, self._names[layer_type])
        return table, position_ids.expand(x.shape[:2]).reshape(-1)


def rotary_table(position_embeddings: tuple[Tensor, Tensor], batch: int, length: int) -> tuple[Tensor, Tensor]:
    """Return the table and the positions in the form of :func:`fastinfer.ops.rotary_embedding`.

    Args:
        position_embeddings: output of :class:`RotaryEmbedding`, or transformers' cosines and sines [1 or batch, length,
            rotary_dim], whose two halves are equal.
        batch, length: shape of the tokens.
    """
    table, positions = position_embeddings
    if positions.is_floating_point():
        half = table.shape[-1] // 2
        rows = torch.arange(table.shape[0] * length, device=table.device).view(table.shape[0], length)
        table = torch.cat((table[..., :half], positions[..., :half]), -1).flatten(0, 1).float()
        positions = rows.expand(batch, length).reshape(-1)
    return table, positions
