"""What the readers of GGUF's blocks share: views of blocks, and bits moved by the word.

The work is numpy's, on one thread: 30 ms for 134 million weights. As parallel loops of torch it took 80 ms, and seconds
on a busy machine, where hundreds of short loops wait for each other's threads. Arithmetic goes 8 bytes at a time (as
uint64), moves between strided places go a whole run at a time (numpy's opaque types ``V16``, ``V32`` and ``V64``).
"""

import numpy as np
import torch
from torch import Tensor

from fastinfer.formats.gguf_types import GGUFType


def split_blocks(data: np.ndarray, type: GGUFType) -> np.ndarray:
    """[rows, row_bytes] as [rows, blocks, block_bytes]."""
    return np.ascontiguousarray(data).reshape(data.shape[0], -1, type.block_bytes)


def halves(blocks: np.ndarray, offset: int) -> np.ndarray:
    """The fp16 number at this byte of every block: [rows, blocks]."""
    return np.ascontiguousarray(blocks[..., offset : offset + 2].view(np.float16)[..., 0])


def bit_fields(blocks: np.ndarray, begin: int, end: int, bits: int, run: int, shift: int = 0) -> np.ndarray:
    """Some bytes of every block as 8 / bits times as many values.

    Every run of so many bytes becomes as many values from its lowest bits, then as many from the next higher ones.

    Args:
        blocks: [rows, blocks, block_bytes] uint8.
        begin, end: the bytes; a multiple of 8.
        bits: of a value; 1, 2 or 4.
        run: bytes.
        shift: of the result, to the left, for high bits that will be joined to low ones.

    Returns:
        [rows, blocks, (end - begin) * 8 / bits] uint8.
    """
    words = np.ascontiguousarray(blocks[..., begin:end].view(f"V{end - begin}")).view(np.uint64)
    mask = np.uint64((2**bits - 1) * 0x0101010101010101)
    values = np.empty((*blocks.shape[:2], (end - begin) // run, 8 // bits), f"V{run}")
    for index in range(8 // bits):
        field = words >> np.uint64(bits * index)
        field &= mask
        field <<= np.uint64(shift)  # numpy's shift of bytes is 10 times slower
        values[..., index] = field.view(values.dtype)
    return values.reshape(*blocks.shape[:2], -1).view(np.uint8)


def by_row(values: np.ndarray) -> Tensor:
    """[rows, ...] as [rows, cols]."""
    return torch.from_numpy(values.reshape(values.shape[0], -1))
