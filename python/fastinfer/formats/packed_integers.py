"""Integers of 2, 3, 4 or 8 bits that lie one after another in int32 words, lowest bits first.

32 integers take as many words as they have bits; of 3 bits some cross from one word into the next.
"""

import numpy as np
import torch
from torch import Tensor


def unpack_integers(words: Tensor, bits: int) -> Tensor:
    """[rows, n] int32 as [rows, n * 32 / bits] uint8; of 3 bits n must be a multiple of 3."""
    stored = np.ascontiguousarray(words.numpy()).view(np.uint8)
    if bits == 8:
        values = stored.copy()  # not the file's own memory
    elif bits == 4:
        values = stored.astype(np.uint16)
        values |= values << 4  # the upper half of each byte goes to the next, still joined to what was there
        values &= 0x0F0F
    elif bits == 2:
        values = stored.astype(np.uint32)
        values |= values << 12
        values &= 0x000F000F
        values |= values << 6
        values &= 0x03030303
    else:
        values = _unpack_three_bits(stored)
    return torch.from_numpy(values.view(np.uint8).reshape(words.shape[0], -1))


def _unpack_three_bits(stored: np.ndarray) -> np.ndarray:
    """Every 3 bytes are 8 integers."""
    triples = stored.reshape(-1, 3).astype(np.uint32)
    joined = triples[:, 0] | triples[:, 1] << 8 | triples[:, 2] << 16
    values = np.empty((len(joined), 8), np.uint8)
    for index in range(8):
        values[:, index] = joined >> (3 * index) & 7
    return values


def pack_integers(values: Tensor, bits: int) -> Tensor:
    """[rows, n] uint8, below 2**bits, as [rows, n * bits / 32] int32; n is a multiple of 8 that fills whole words."""
    eights = values.numpy().reshape(-1, 8)
    joined = np.zeros(len(eights), "<u8")
    for index in range(8):
        joined |= eights[:, index].astype(np.uint64) << np.uint64(bits * index)
    stored = np.ascontiguousarray(joined.view(np.uint8).reshape(-1, 8)[:, :bits])
    return torch.from_numpy(stored.reshape(-1).view(np.int32).reshape(values.shape[0], -1))
