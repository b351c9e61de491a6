"""Unpacking of GGUF tensors into integers, scales and minimums.

:func:`unpack` and :func:`unpack_rows` serve all storage types. This file unpacks the types with blocks of 32 values;
:mod:`fastinfer.formats.gguf_unpack_k_quants` unpacks Q2_K to Q6_K, with blocks of 256.

A block of 32 values has an fp16 scale, then (types ``_1``) an fp16 minimum, then (5 bits) the 32 fifth bits, then the
integers. For 4 and 5 bits, the low nibbles of the last 16 bytes are the first 16 values, the high nibbles the others.
Block layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h.
"""

import numpy as np
import torch
from torch import Tensor

from fastinfer.errors import UnsupportedModelError
from fastinfer.formats.gguf_bit_fields import bit_fields, by_row, halves, split_blocks
from fastinfer.formats.gguf_types import GGUFTensor, GGUFType
from fastinfer.formats.gguf_unpack_k_quants import (
    GROUPS_OF_16,
    GROUPS_OF_32,
    split_groups_of_16,
    split_groups_of_32,
)
from fastinfer.formats.unpacked import Dense, Int4, Int8, Lut, Unpacked

DENSE_DTYPES = {GGUFType.F32: torch.float32, GGUFType.F16: torch.float16, GGUFType.BF16: torch.bfloat16}
INT4_TYPES = (GGUFType.Q4_0, GGUFType.Q4_1)
INT8_TYPES = (GGUFType.Q8_0, GGUFType.Q5_0, GGUFType.Q5_1)
SUPPORTED_TYPES = (*DENSE_DTYPES, *INT4_TYPES, *INT8_TYPES, GGUFType.IQ4_NL, *GROUPS_OF_32, *GROUPS_OF_16)

# Look-up table of IQ4_NL, for normally distributed weights.
IQ4_NL_TABLE = torch.tensor(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.float32
)


def unpack(tensor: GGUFTensor, *, exact: bool = True) -> Unpacked:
    """Unpack a tensor; a dense tensor keeps its shape, a quantised one becomes [rows, cols].

    Args:
        tensor: tensor of one of the ``SUPPORTED_TYPES``.
        exact: see :func:`unpack_rows`.

    Raises:
        UnsupportedModelError: the tensor's type is not one of ``SUPPORTED_TYPES``.
    """
    unpacked = unpack_rows(tensor.data, tensor.type, tensor.name, exact=exact)
    return Dense(unpacked.values.view(tensor.shape)) if isinstance(unpacked, Dense) else unpacked


def unpack_rows(data: np.ndarray, type: GGUFType, name: str = "tensor", *, exact: bool = True) -> Unpacked:
    """Unpack whole rows, which may have been selected, reordered or concatenated while they were packed.

    Args:
        data: [rows, row_bytes] uint8.
        type: storage type of the rows.
        name: name of the tensor, for error messages.
        exact: whether to unpack without any rounding. This makes K types slower: the scales of Q4_K and Q5_K are
            products, which fp16 cannot hold exactly, so scales and minimums are fp32; Q6_K, Q3_K and Q2_K have groups
            of 16, which the kernels do not support, so they become dense fp32. Otherwise scales and minimums become
            fp16, and pairs of groups of 16 are joined into groups of 32 integers, with a small error; see
            :mod:`fastinfer.formats.gguf_unpack_k_quants`. The other types are always unpacked without rounding.

    Raises:
        UnsupportedModelError: the type is not one of ``SUPPORTED_TYPES``.
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
    """View rows of F32, F16 or BF16 as [rows, cols]; no copy if ``data`` is contiguous."""
    return torch.from_numpy(np.ascontiguousarray(data)).view(DENSE_DTYPES[type])


def split_int4(data: np.ndarray, type: GGUFType) -> Int4:
    """Unpack rows of Q4_0 or Q4_1."""
    blocks = split_blocks(data, type)
    mins = _half(blocks, 2) if type is GGUFType.Q4_1 else None
    return Int4(by_row(_nibbles(blocks)), _half(blocks, 0), mins)


def split_int8(data: np.ndarray, type: GGUFType) -> Int8:
    """Unpack rows of Q8_0 (q is -128..127), Q5_0 (-16..15) or Q5_1 (0..31)."""
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
            q -= 16  # wraps around in uint8, which is correct for the bytes as int8
    return Int8(by_row(q.view(np.int8)), _half(blocks, 0), mins)


def split_iq4_nl(data: np.ndarray) -> Lut:
    """Unpack rows of IQ4_NL, which has the blocks of Q4_0 with indices into a look-up table."""
    blocks = split_blocks(data, GGUFType.IQ4_NL)
    return Lut(by_row(_nibbles(blocks)), _half(blocks, 0), table=IQ4_NL_TABLE)


def _half(blocks: np.ndarray, offset: int) -> Tensor:
    return torch.from_numpy(halves(blocks, offset))


def _nibbles(blocks: np.ndarray) -> np.ndarray:
    """Unpack the last 16 bytes of each block to 32 values: [rows, blocks, 32]."""
    block_bytes = blocks.shape[-1]
    return bit_fields(blocks, block_bytes - 16, block_bytes, bits=4, run=16)
