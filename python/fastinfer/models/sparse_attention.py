"""Sparse attention: which tokens and layers have it, and the memory that it takes."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fastinfer.models.config import KVShape, ModelConfig

# The first layers of a model attend to everything: what they read is spread over the whole text.
DENSE_LAYERS = 2
KEY_CODES_DTYPE = torch.int32
_CODES_PER_WORD = 8


@dataclass(frozen=True, slots=True)
class SparseRows:
    """Tokens of a batch that attend to chosen pages of the cache: the generated ones, which come first.

    Attributes:
        num_rows: number of these tokens.
        num_pages: number of pages that each of them reads at most, for each KV head.
        row_start: [num_rows + 1] int32; 0, 1, 2, ..., as each of them is a sequence of its own.
        dense_lens: [seqs] int32; ``Batch.seq_lens`` of the sequences whose tokens are those of prompts, 0 for the
            others. ``None`` if there are no tokens of prompts.
    """

    num_rows: int
    num_pages: int
    row_start: Tensor
    dense_lens: Tensor | None

    def of_last_rows(self, num_tokens: int, first_prompt_row: int) -> "SparseRows | None":
        """Return these tokens among the last rows of each sequence, see :class:`fastinfer.models.batch.LastRows`."""
        num_rows = min(first_prompt_row, num_tokens)
        if num_rows == 0:
            return None
        dense_lens = None if num_rows == num_tokens else self.dense_lens
        return SparseRows(num_rows, self.num_pages, self.row_start[: num_rows + 1], dense_lens)


def has_key_codes(config: ModelConfig, layer: int) -> bool:
    """Return whether the keys of a layer have codes: a later layer with full attention and keys of its own."""
    return (
        layer >= DENSE_LAYERS
        and config.latent_attention is None
        and config.kv_layer(layer) == layer
        and not config.has_state(layer)
        and not config.window(layer)
    )


def key_codes_shape(shape: KVShape, block_size: int) -> tuple[int, ...]:
    """Return the shape of the codes of one page, see :func:`fastinfer.ops.store_key_codes`."""
    return shape.num_heads, shape.head_dim // _CODES_PER_WORD + 1, block_size


def key_codes_bytes(shape: KVShape) -> int:
    """Return the size in bytes of the codes of one token."""
    return math.prod(key_codes_shape(shape, 1)) * KEY_CODES_DTYPE.itemsize
