"""Views of GGUF blocks and extraction of their bit fields, shared by the readers of all block types."""

import numpy as np
import torch
from torch import Tensor

from fastinfer import _C
from fastinfer.formats.gguf_types import GGUFType


def split_blocks(data: np.ndarray, type: GGUFType) -> np.ndarray:
    """View rows [rows, row_bytes] as blocks [rows, blocks, block_bytes]."""
    return np.ascontiguousarray(data).reshape(data.shape[0], -1, type.block_bytes)


def halves(blocks: np.ndarray, offset: int) -> np.ndarray:
    """Read the fp16 number at a byte offset of every block: [rows, blocks]."""
    return bit_fields(blocks, offset, offset + 2, bits=8, run=2).view(np.float16)[..., 0]


def bit_fields(blocks: np.ndarray, begin: int, end: int, bits: int, run: int, shift: int = 0) -> np.ndarray:
    """Unpack a range of bytes of every block into 8 / bits times as many values.

    The range is divided into runs of ``run`` bytes. Each run gives ``run`` values from the lowest bits of its bytes,
    then ``run`` values from the next higher bits, and so on.

    Args:
        blocks: [rows, blocks, block_bytes] uint8, contiguous.
        begin, end: byte range within a block.
        bits: number of bits of a value: 1, 2, 4 or 8.
        run: number of bytes of a run.
        shift: left shift of the values, for high bits to be combined with low ones.

    Returns:
        [rows, blocks, (end - begin) * 8 / bits] uint8.
    """
    values = np.empty((*blocks.shape[:2], (end - begin) * 8 // bits), np.uint8)
    _C.bit_fields(values, blocks, blocks.shape[2], begin, end, bits, run, shift)
    return values


def by_row(values: np.ndarray) -> Tensor:
    """Flatten [rows, ...] to a tensor [rows, cols]."""
    return torch.from_numpy(values.reshape(values.shape[0], -1))
