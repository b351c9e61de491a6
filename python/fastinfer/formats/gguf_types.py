"""Tensors of GGUF files and their storage types. Ids and block sizes: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md."""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np


class GGUFType(IntEnum):
    """Storage type of a tensor: id, values per block, bytes per block."""

    block_size: int
    block_bytes: int

    def __new__(cls, value: int, block_size: int = 0, block_bytes: int = 0) -> "GGUFType":
        member = int.__new__(cls, value)
        member._value_ = value
        member.block_size = block_size
        member.block_bytes = block_bytes
        return member

    F32 = 0, 1, 4
    F16 = 1, 1, 2
    Q4_0 = 2, 32, 18
    Q4_1 = 3, 32, 20
    Q5_0 = 6, 32, 22
    Q5_1 = 7, 32, 24
    Q8_0 = 8, 32, 34
    Q8_1 = 9, 32, 40
    Q2_K = 10, 256, 84
    Q3_K = 11, 256, 110
    Q4_K = 12, 256, 144
    Q5_K = 13, 256, 176
    Q6_K = 14, 256, 210
    Q8_K = 15, 256, 292
    IQ2_XXS = 16, 256, 66
    IQ2_XS = 17, 256, 74
    IQ3_XXS = 18, 256, 98
    IQ1_S = 19, 256, 50
    IQ4_NL = 20, 32, 18
    IQ3_S = 21, 256, 110
    IQ2_S = 22, 256, 82
    IQ4_XS = 23, 256, 136
    I8 = 24, 1, 1
    I16 = 25, 1, 2
    I32 = 26, 1, 4
    I64 = 27, 1, 8
    F64 = 28, 1, 8
    IQ1_M = 29, 256, 56
    BF16 = 30, 1, 2
    TQ1_0 = 34, 256, 54
    TQ2_0 = 35, 256, 66
    MXFP4 = 39, 32, 17
    NVFP4 = 40, 64, 36
    Q1_0 = 41, 128, 18
    Q2_0 = 42, 64, 18


@dataclass(frozen=True, eq=False)
class GGUFTensor:
    """Tensor of a GGUF file in its packed form.

    Attributes:
        name: name in the file.
        shape: dimensions in PyTorch's order, rows first; the file has the reverse order.
        type: storage type.
        data: [rows, row_bytes] uint8, a view of the file; rows is the product of all dimensions but the last. Whole
            rows can be selected or reordered without unpacking them.
    """

    name: str
    shape: tuple[int, ...]
    type: GGUFType
    data: np.ndarray
