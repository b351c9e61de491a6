"""Unpacking of GGUF's tensors into integers, scales and minimums.

This file has the types whose blocks hold 32 values: an fp16 scale, then for the ``_1`` types an fp16 minimum, then for
5 bits the 32 fifth bits, then the integers. Low nibbles of a block's 16 bytes are its first 16 values, high nibbles the
others. :mod:`fastinfer.formats.gguf_kquants` has those of 256. Block layouts:
https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h.
"""

import numpy as np
import torch
from torch import Tensor

from fastinfer.errors import UnsupportedModelError
from fastinfer.formats.gguf_blocks import bit_fields, by_row, halves, split_blocks
from fastinfer.formats.gguf_kquants import (
    GROUPS_OF_16,
    GROUPS_OF_32,
    split_groups_of_16,
    split_groups_of_32,
)
from fastinfer.formats.gguf_types import GGUFTensor, GGUFType
from fastinfer.formats.unpacked import Dense, Int4, Int8, Lut, Unpacked

DENSE_DTYPES = {GGUFType.F32: torch.float32, GGUFType.F16: torch.float16, GGUFType.BF16: torch.bfloat16}
INT4_TYPES = (GGUFType.Q4_0, GGUFType.Q4_1)
INT8_TYPES = (GGUFType.Q8_0, GGUFType.Q5_0, GGUFType.Q5_1)
SUPPORTED_TYPES = (*DENSE_DTYPES, *INT4_TYPES, *INT8_TYPES, GGUFType.IQ4_NL, *GROUPS_OF_32, *GROUPS_OF_16)

# The values of IQ4_NL's 16 levels, spread as normally distributed weights want them.
IQ4_NL_TABLE = torch.tensor(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.float32
)


def unpack(tensor: GGUFTensor, *, exact: bool = True) -> Unpacked:
    """Unpack a tensor of the file; a dense one keeps its shape, a quantised one is [rows, cols].

    Args:
        tensor: of any of ``SUPPORTED_TYPES``.
        exact: see :func:`unpack_rows`.

    Raises:
        UnsupportedModelError: the tensor's type is not among the supported ones.
    """
    unpacked = unpack_rows(tensor.data, tensor.type, tensor.name, exact=exact)
    return Dense(unpacked.values.view(tensor.shape)) if isinstance(unpacked, Dense) else unpacked


def unpack_rows(data: np.ndarray, type: GGUFType, name: str = "tensor", *, exact: bool = True) -> Unpacked:
    """Unpack whole rows, for instance of several tensors that were concatenated, or reordered, while still packed.

    Args:
        data: [rows, row_bytes] uint8.
        type: how the rows are stored.
        name: what to call the tensor in an error.
        exact: without loss. This costs speed for the K types, whose scales are products of two numbers that fp16 does
            not hold (Q4_K, Q5_K: fp32 scales and minimums), or whose groups of 16 no kernel has (Q6_K, Q3_K, Q2_K:
            dense fp32). Otherwise these numbers become fp16, and groups of 32 integers are made of those of 16; see
            :mod:`fastinfer.formats.gguf_kquants` for the small error. The other types lose nothing in either case.

    Raises:
        UnsupportedModelError: the type is not among ``SUPPORTED_TYPES``.
    """
    if type in DENSE_DTYPES:
        return Dense(to_dense(data, type))
    if type in INT4_TYPES:
        return split_int4(data, type)
    if type in INT8_TYPES:
        return split_int8(data, type)
    if type is GGUFType.IQ4_NL:
        return split_iq4_nl(data)
    if type in GROUPS_OF_32:
        return split_groups_of_32(data, type, exact)
    if type in GROUPS_OF_16:
        return split_groups_of_16(data, type, exact)
    supported = ", ".join(known.name for known in SUPPORTED_TYPES)
    raise UnsupportedModelError(f"tensor {name!r} is stored as {type.name}; supported are {supported}")


def to_dense(data: np.ndarray, type: GGUFType) -> Tensor:
    """Rows of F32, F16 or BF16, [rows, cols]; no copy if ``data`` is contiguous."""
    return torch.from_numpy(np.ascontiguousarray(data)).view(DENSE_DTYPES[type])


def split_int4(data: np.ndarray, type: GGUFType) -> Int4:
    """Rows of Q4_0 or Q4_1."""
    blocks = split_blocks(data, type)
    mins = _half(blocks, 2) if type is GGUFType.Q4_1 else None
    return Int4(by_row(_nibbles(blocks)), _half(blocks, 0), mins)


def split_int8(data: np.ndarray, type: GGUFType) -> Int8:
    """Rows of Q8_0 (q is -128..127), Q5_0 (-16..15) or Q5_1 (0..31)."""
    blocks = split_blocks(data, type)
    mins = _half(blocks, 2) if type is GGUFType.Q5_1 else None
    if type is GGUFType.Q8_0:
        q = bit_fields(blocks, 2, 34, bits=8, run=32)
    else:
        fifth_bits = np.unpackbits(np.ascontiguousarray(blocks[..., -20:-16]), bitorder="little").view(np.uint64)
        fifth_bits <<= np.uint64(4)
        q = _nibbles(blocks)
        q |= fifth_bits.view(np.uint8).reshape(q.shape)
        if type is GGUFType.Q5_0:
            q -= 16  # wraps around in uint8, which is right once the bytes are seen as int8
    return Int8(by_row(q.view(np.int8)), _half(blocks, 0), mins)


def split_iq4_nl(data: np.ndarray) -> Lut:
    """Rows of IQ4_NL: Q4_0's blocks, whose integers are places in a table."""
    blocks = split_blocks(data, GGUFType.IQ4_NL)
    return Lut(by_row(_nibbles(blocks)), _half(blocks, 0), table=IQ4_NL_TABLE)


def _half(blocks: np.ndarray, offset: int) -> Tensor:
    return torch.from_numpy(halves(blocks, offset))


def _nibbles(blocks: np.ndarray) -> np.ndarray:
    """The 32 values in a block's last 16 bytes."""
    block_bytes = blocks.shape[-1]
    return bit_fields(blocks, block_bytes - 16, block_bytes, bits=4, run=16)
