"""Tensors and rows of GGUF files in the forms of :mod:`fastinfer.formats.unpacked`."""

import math

import numpy as np
import torch
from torch import Tensor

from fastinfer.errors import UnsupportedModelError
from fastinfer.formats.gguf_rows import QUANTIZED_TYPES, TWO_LEVEL_SIZES, GGUFRows
from fastinfer.formats.gguf_types import GGUFTensor, GGUFType
from fastinfer.formats.nvfp4 import unpack_nvfp4_blocks
from fastinfer.formats.unpacked import Dense, Int8, Lut, Unpacked

DENSE_DTYPES = {GGUFType.F32: torch.float32, GGUFType.F16: torch.float16, GGUFType.BF16: torch.bfloat16}
SUPPORTED_TYPES = (*DENSE_DTYPES, *QUANTIZED_TYPES, GGUFType.NVFP4)


def unpack(tensor: GGUFTensor, *, exact: bool = True) -> Unpacked:
    """Unpack a tensor; a dense tensor keeps its shape, a quantised one becomes [rows, cols].

    Args:
        tensor: tensor of one of the ``SUPPORTED_TYPES``.
        exact: see :func:`unpack_rows`.

    Raises:
        UnsupportedModelError: the tensor's type is not one of ``SUPPORTED_TYPES``.
    """
    weight = unpack_rows(tensor.data, tensor.type, tensor.name, exact=exact)
    return Dense(weight.values.view(tensor.shape)) if isinstance(weight, Dense) else weight


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
            :mod:`fastinfer.formats.gguf_rows`. The other types are always unpacked without rounding.

    Raises:
        UnsupportedModelError: the type is not one of ``SUPPORTED_TYPES``.
    """
    rows = read_rows(data, type, name, exact=exact)
    return rows.unpack() if isinstance(rows, GGUFRows) else rows


def read_rows(
    data: np.ndarray, type: GGUFType, name: str = "tensor", *, exact: bool = True, factor: Tensor | None = None
) -> Dense | Int8 | GGUFRows:
    """View whole rows; quantised ones are unpacked later, after they have been selected, reordered or concatenated.

    Args:
        data, type, name, exact: as for :func:`unpack_rows`.
        factor: number by which a weight in NVFP4 is multiplied; ``None`` for 1. These weights are unpacked at once.

    Raises:
        UnsupportedModelError: the type is not one of ``SUPPORTED_TYPES``.
    """
    if type in DENSE_DTYPES:
        return Dense(to_dense(data, type))
    if type in QUANTIZED_TYPES:
        return GGUFRows.of(data, type, exact)
    if type is GGUFType.NVFP4:
        return unpack_nvfp4_blocks(data, torch.tensor(1.0) if factor is None else factor, exact)
    supported = ", ".join(known.name for known in SUPPORTED_TYPES)
    raise UnsupportedModelError(f"tensor {name!r} is stored as {type.name}; supported are {supported}")


def to_dense(data: np.ndarray, type: GGUFType) -> Tensor:
    """View rows of F32, F16 or BF16 as [rows, cols]; no copy if ``data`` is contiguous."""
    return torch.from_numpy(np.ascontiguousarray(data)).view(DENSE_DTYPES[type])


def packed_bytes(tensor: GGUFTensor, exact: bool, device: str, is_embedding: bool = False) -> int:
    """Return the size of a tensor in the form that it has in a device's memory, without the padding of its rows.

    Args:
        tensor: tensor of any type; those that are not supported count as they are stored.
        exact: see :func:`unpack_rows`.
        device: device of the weights.
        is_embedding: whether its rows are looked up, for which a look-up table becomes integers of 8 bits.
    """
    bits = tensor.data.nbytes * 8 / math.prod(tensor.shape)
    if tensor.type is GGUFType.NVFP4:
        bits = 32 if exact else 8.5
    elif tensor.type in QUANTIZED_TYPES:
        rows = GGUFRows.of(tensor.data[:1], tensor.type, exact)
        bits = rows.packed_bits
        if device == "cpu":
            bits = TWO_LEVEL_SIZES.get(rows.two_level_bits, bits - 3 * rows.has_five_bits)
        bits += 4 if is_embedding and isinstance(rows.form, Lut) else 0
    return round(math.prod(tensor.shape) * bits / 8)
