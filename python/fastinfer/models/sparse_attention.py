"""Sparse attention: which tokens and layers have it, and the memory that it takes."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fastinfer.models.config import KVShape, ModelConfig

# The first layers of a model attend to everything: what they read is spread over the whole text.
DENSE_LAYERS = 2
# Rows that see no more pages read them all: choosing some would take longer.
DENSE_PAGES = 16
CODES_DTYPE = torch.int32
_CODES_PER_WORD = 8


@dataclass(frozen=True, slots=True)
class SparseRows:
    """The tokens of a batch that attend to chosen pages of the cache: generated ones, and in tiles those of prompts.

    Attributes:
        share: share of their attention that the pages must have, see :func:`fastinfer.ops.select_pages`.
        num_dense_pages: number of pages up to which all are read.
        num_generated: number of generated tokens, which come first.
        row_start: [num_generated + 1] int32; 0, 1, 2, ..., as each of them is a row of its own.
        dense_lens: [seqs] int32; ``Batch.seq_lens`` of the sequences whose tokens are those of prompts, 0 for the
            others. ``None`` if there are no tokens of prompts.
        tile_start: [tiles + 1] int32; first tokens of the rows where those of prompts choose pages, too: ``row_start``,
            and then tiles of prompts, each within a block. ``None`` if prompts attend to everything.
    """

    share: float
    num_dense_pages: int
    num_generated: int
    row_start: Tensor
    dense_lens: Tensor | None
    tile_start: Tensor | None = None

    def of_last_rows(self, num_tokens: int, first_prompt_row: int) -> "SparseRows | None":
        """Return these tokens among the last rows of each sequence, see :class:`fastinfer.models.batch.LastRows`.

        The last rows of a prompt attend to everything: they are no tiles.
        """
        num_generated = min(first_prompt_row, num_tokens)
        if num_generated == 0:
            return None
        dense_lens = None if num_generated == num_tokens else self.dense_lens
        row_start = self.row_start[: num_generated + 1]
        return SparseRows(self.share, self.num_dense_pages, num_generated, row_start, dense_lens)


def has_key_codes(config: ModelConfig, layer: int) -> bool:
    """Return whether the keys of a layer have codes: a later layer with full attention and keys of its own."""
    return (
        layer >= DENSE_LAYERS
        and config.latent_attention is None
        and config.kv_layer(layer) == layer
        and not config.has_state(layer)
        and not config.window(layer)
    )


def has_value_codes(config: ModelConfig, block_size: int, device: str) -> bool:
    """Return whether the values of layers with codes of keys have codes, too: tokens then attend to all pages.

    Args:
        config: configuration of the model. A cap of the logits would change how the pages that are not chosen count.
        block_size: tokens of a page; a word has the codes of eight of them.
        device: device of the cache. On GPUs this is not built.
    """
    return device == "cpu" and block_size % _CODES_PER_WORD == 0 and not config.attention_softcap


def codes_shape(shape: KVShape, block_size: int) -> tuple[int, ...]:
    """Return the shape of the codes of one page's keys or values, see :func:`fastinfer.ops.store_key_codes`."""
    return shape.num_heads, shape.head_dim // _CODES_PER_WORD + 1, block_size


def codes_bytes(shape: KVShape, *, with_values: bool) -> int:
    """Return the size in bytes of the codes of one token."""
    return (1 + with_values) * math.prod(codes_shape(shape, 1)) * CODES_DTYPE.itemsize
