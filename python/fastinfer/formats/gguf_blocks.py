"""What the readers of GGUF's blocks share: views of blocks, and parts of them side by side."""

import numpy as np
import torch
from torch import Tensor

from fastinfer import _C
from fastinfer.formats.gguf_types import GGUFType


def split_blocks(data: np.ndarray, type: GGUFType) -> np.ndarray:
    """[rows, row_bytes] as [rows, blocks, block_bytes]."""
    return np.ascontiguousarray(data).reshape(data.shape[0], -1, type.block_bytes)


def halves(blocks: np.ndarray, offset: int) -> np.ndarray:
    """The fp16 number at this byte of every block: [rows, blocks]."""
    return bit_fields(blocks, offset, offset + 2, bits=8, run=2).view(np.float16)[..., 0]


def bit_fields(blocks: np.ndarray, begin: int, end: int, bits: int, run: int, shift: int = 0) -> np.ndarray:
    """Some bytes of every block as 8 / bits times as many values.

    Every run of so many bytes becomes as many values from its lowest bits, then as many from the next higher ones.

    Args:
        blocks: [rows, blocks, block_bytes] uint8, contiguous.
        begin, end: the bytes.
        bits: of a value; 1, 2, 4 or 8.
        run: bytes.
        shift: of the result, to the left, for high bits that will be joined to low ones.

    Returns:
        [rows, blocks, (end - begin) * 8 / bits] uint8.
    """
    values = np.empty((*blocks.shape[:2], (end - begin) * 8 // bits), np.uint8)
    _C.bit_fields(values, blocks, blocks.shape[2], begin, end, bits, run, shift)
    return values


def by_row(values: np.ndarray) -> Tensor:
    """[rows, ...] as [rows, cols]."""
    return torch.from_numpy(values.reshape(values.shape[0], -1))
