"""Unpacking of GGUF's quantised blocks into integers, scales and minimums, without loss.

A row is a run of blocks of 32 values: an fp16 scale, then for the ``_1`` types an fp16 minimum, then for 5 bits the 32
fifth bits, then the integers. Low nibbles of a block's 16 bytes are its first 16 values, high nibbles the others. Block
layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fastinfer.errors import UnsupportedModelError
from fastinfer.formats.gguf_types import GGUFTensor, GGUFType

_LOW_NIBBLES = np.uint64(0x0F0F0F0F0F0F0F0F)

DENSE_DTYPES = {GGUFType.F32: torch.float32, GGUFType.F16: torch.float16, GGUFType.BF16: torch.bfloat16}
INT4_TYPES = (GGUFType.Q4_0, GGUFType.Q4_1)
INT8_TYPES = (GGUFType.Q8_0, GGUFType.Q5_0, GGUFType.Q5_1)


@dataclass(frozen=True, eq=False)
class Dense:
    """A weight that is not quantised.

    ``values`` is fp32, fp16 or bf16 as in the file, and shares the file's mapped memory: do not write to it.
    """

    values: Tensor


@dataclass(frozen=True, eq=False)
class Int4:
    """w = scale * q + min for each group of 32 inputs; without minimums w = scale * (q - 8).

    ``q`` is [rows, cols] uint8, 0..15; ``scales`` and ``mins`` are [rows, cols / 32] fp16.
    """

    q: Tensor
    scales: Tensor
    mins: Tensor | None


@dataclass(frozen=True, eq=False)
class Int8:
    """w = scale * q + min for each group of 32 inputs; without minimums w = scale * q.

    ``q`` is [rows, cols] int8; ``scales`` and ``mins`` are [rows, cols / 32] fp16.
    """

    q: Tensor
    scales: Tensor
    mins: Tensor | None


def unpack(tensor: GGUFTensor) -> Dense | Int4 | Int8:
    """Unpack a tensor of the file; a dense one keeps its shape, a quantised one is [rows, cols].

    Raises:
        UnsupportedModelError: the tensor's type is not among the supported ones.
    """
    unpacked = unpack_rows(tensor.data, tensor.type, tensor.name)
    return Dense(unpacked.values.view(tensor.shape)) if isinstance(unpacked, Dense) else unpacked


def unpack_rows(data: np.ndarray, type: GGUFType, name: str = "tensor") -> Dense | Int4 | Int8:
    """Unpack whole rows, for instance of several tensors that were concatenated, or reordered, while still packed.

    Args:
        data: [rows, row_bytes] uint8.
        type: how the rows are stored.
        name: what to call the tensor in an error.
    """
    if type in DENSE_DTYPES:
        return Dense(to_dense(data, type))
    if type in INT4_TYPES:
        return split_int4(data, type)
    if type in INT8_TYPES:
        return split_int8(data, type)
    supported = ", ".join(known.name for known in (*DENSE_DTYPES, *INT4_TYPES, *INT8_TYPES))
    raise UnsupportedModelError(f"tensor {name!r} is stored as {type.name}; supported are {supported}")


def to_dense(data: np.ndarray, type: GGUFType) -> Tensor:
    """Rows of F32, F16 or BF16, [rows, cols]; no copy if ``data`` is contiguous."""
    return torch.from_numpy(np.ascontiguousarray(data)).view(DENSE_DTYPES[type])


def split_int4(data: np.ndarray, type: GGUFType) -> Int4:
    """Rows of Q4_0 or Q4_1."""
    blocks = _blocks(data, type)
    mins = _half(blocks, 2) if type is GGUFType.Q4_1 else None
    return Int4(_rows(_nibbles(blocks[..., -16:])), _half(blocks, 0), mins)


def split_int8(data: np.ndarray, type: GGUFType) -> Int8:
    """Rows of Q8_0 (q is -128..127), Q5_0 (-16..15) or Q5_1 (0..31)."""
    blocks = _blocks(data, type)
    mins = _half(blocks, 2) if type is GGUFType.Q5_1 else None
    if type is GGUFType.Q8_0:
        q = np.ascontiguousarray(blocks[..., -32:].view("V32")).view(np.uint8)
    else:
        fifth_bits = np.unpackbits(blocks[..., -20:-16], axis=-1, bitorder="little")
        q = _nibbles(blocks[..., -16:]) | fifth_bits << 4
        if type is GGUFType.Q5_0:
            q -= 16  # wraps around in uint8, which is right once the bytes are seen as int8
    return Int8(_rows(q.view(np.int8)), _half(blocks, 0), mins)


# The work below is numpy's, on one thread: 30 ms for 134 million weights. As parallel loops of torch it took 80 ms, and
# seconds on a busy machine, where hundreds of short loops wait for each other's threads.


def _blocks(data: np.ndarray, type: GGUFType) -> np.ndarray:
    """[rows, row_bytes] as [rows, blocks, block_bytes]."""
    return np.ascontiguousarray(data).reshape(data.shape[0], -1, type.block_bytes)


def _rows(values: np.ndarray) -> Tensor:
    """[rows, blocks, 32] as [rows, cols]."""
    return torch.from_numpy(values.reshape(values.shape[0], -1))


def _half(blocks: np.ndarray, offset: int) -> Tensor:
    """The fp16 number at this byte of every block: [rows, blocks]."""
    return torch.from_numpy(np.ascontiguousarray(blocks[..., offset : offset + 2].view(np.float16)[..., 0]))


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """[rows, blocks, 16] bytes as [rows, blocks, 32] values: low nibbles first.

    Arithmetic goes 8 bytes at a time, moves between strided places go 16 at a time (numpy's opaque type ``V16``).
    """
    words = np.ascontiguousarray(packed.view("V16")).view(np.uint64)
    values = np.empty((*packed.shape[:-1], 2), "V16")
    values[..., 0] = (words & _LOW_NIBBLES).view("V16")[..., 0]
    values[..., 1] = (words >> 4 & _LOW_NIBBLES).view("V16")[..., 0]
    return values.view(np.uint8)
