"""Rotary position embedding as a module: the table once, instead of cosines and sines in every step."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fastinfer.nn.exact_buffers import ExactBuffers


class RotaryEmbedding(ExactBuffers):
    """What transformers' decoders call for their ``position_embeddings``, which :class:`Attention` takes.

    Args:
        tables: [max_position, rotary_dim] fp32 of :func:`fastinfer.ops.cos_sin_cache`; or several by the type of layer
            that they are for.
    """

    def __init__(self, tables: Tensor | Mapping[str | None, Tensor]) -> None:
        super().__init__()
        by_type = {None: tables} if isinstance(tables, Tensor) else tables
        self._names = {layer_type: f"{layer_type or 'cos_sin'}_cache" for layer_type in by_type}
        for layer_type, table in by_type.items():
            self.register_buffer(self._names[layer_type], table, persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
        """The table, and the tokens' positions.

        Args:
            x: [batch, length, ...], of which only the sizes count.
            position_ids: [1 or batch, length] int64; below the table's ``max_position``.
            layer_type: one that the module has a table for.

        Returns:
            [max_position, rotary_dim] fp32 and [batch * length] int64.
        """
        table: Tensor = getattr(self, self._names[layer_type])
        return table, position_ids.expand(x.shape[:2]).reshape(-1)


def rotary_table(position_embeddings: tuple[Tensor, Tensor], batch: int, length: int) -> tuple[Tensor, Tensor]:
    """Table and positions as :func:`fastinfer.ops.rotary_embedding` takes them.

    Args:
        position_embeddings: of :class:`RotaryEmbedding`; or transformers' own, cosines and sines [1 or batch, length,
            rotary_dim], both halves of which are the same.
        batch, length: of the tokens.
    """
    table, positions = position_embeddings
    if positions.is_floating_point():
        half = table.shape[-1] // 2
        table = torch.cat((table[..., :half], positions[..., :half]), -1).flatten(0, 1).float()
        positions = torch.arange(len(table), device=table.device).view(-1, length).expand(batch, length).reshape(-1)
    return table, positions
