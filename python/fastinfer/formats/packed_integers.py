"""Packing of integers of 2 to 6 or 8 bits into int32 words, one after another from the lowest bits up.

32 integers of ``bits`` bits fill ``bits`` words; some integers of 3, 5 and 6 bits cross from one word into the next.
"""

import numpy as np
import torch
from torch import Tensor


def unpack_integers(words: Tensor, bits: int) -> Tensor:
    """Unpack [rows, n] int32 to [rows, n * 32 / bits] uint8; for 3, 5 and 6 bits n is a multiple of bits.

    Rows of 2, 4 or 8 bits may also be of bytes, and have several dimensions.
    """
    stored = np.ascontiguousarray(words.numpy()).view(np.uint8)
    if bits == 8:
        values = stored.copy()  # the result must not share memory with the file
    elif bits == 4:
        values = stored.astype(np.uint16)
        # Move the upper half of each byte to the next byte, and clear the other bits.
        values |= values << 4
        values &= 0x0F0F
    elif bits == 2:
        values = stored.astype(np.uint32)
        values |= values << 12
        values &= 0x000F000F
        values |= values << 6
        values &= 0x03030303
    else:
        values = _unpack_eights(stored, bits)
    return torch.from_numpy(values.view(np.uint8).reshape(words.shape[0], -1))


def _unpack_eights(stored: np.ndarray, bits: int) -> np.ndarray:
    """Unpack each group of ``bits`` bytes to 8 integers."""
    joined = np.zeros((stored.size // bits, 8), np.uint8)
    joined[:, :bits] = stored.reshape(-1, bits)
    numbers = joined.view("<u8")[:, 0]
    values = np.empty((len(numbers), 8), np.uint8)
    for index in range(8):
        values[:, index] = numbers >> np.uint64(bits * index) & np.uint64(2**bits - 1)
    return values


def pack_integers(values: Tensor, bits: int) -> Tensor:
    """Pack [rows, n] uint8, below 2**bits, to [rows, n * bits / 32] int32; n must be a multiple of 8 and fill words."""
    eights = values.numpy().reshape(-1, 8)
    joined = np.zeros(len(eights), "<u8")
    for index in range(8):
        joined |= eights[:, index].astype(np.uint64) << np.uint64(bits * index)
    stored = np.ascontiguousarray(joined.view(np.uint8).reshape(-1, 8)[:, :bits])
    return torch.from_numpy(stored.reshape(-1).view(np.int32).reshape(values.shape[0], -1))
