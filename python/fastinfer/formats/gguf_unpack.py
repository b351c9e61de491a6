"""Tensors and rows of GGUF files in the forms of :mod:`fastinfer.formats.unpacked`."""

import numpy as np
import torch
from torch import Tensor

from fastinfer.errors import UnsupportedModelError
from fastinfer.formats.gguf_rows import QUANTIZED_TYPES, GGUFRows
from fastinfer.formats.gguf_types import GGUFTensor, GGUFType
from fastinfer.formats.unpacked import Dense, Unpacked

DENSE_DTYPES = {GGUFType.F32: torch.float32, GGUFType.F16: torch.float16, GGUFType.BF16: torch.bfloat16}
SUPPORTED_TYPES = (*DENSE_DTYPES, *QUANTIZED_TYPES)


def unpack(tensor: GGUFTensor, *, exact: bool = True) -> Unpacked:
    """Unpack a tensor; a dense tensor keeps its shape, a quantised one becomes [rows, cols].

    Args:
        tensor: tensor of one of the ``SUPPORTED_TYPES``.
        exact: see :func:`unpack_rows`.

    Raises:
        UnsupportedModelError: the tensor's type is not one of ``SUPPORTED_TYPES``.
    """
    rows = read_rows(tensor.data, tensor.type, tensor.name, exact=exact)
    return Dense(rows.values.view(tensor.shape)) if isinstance(rows, Dense) else rows.unpack()


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
    return rows if isinstance(rows, Dense) else rows.unpack()


def read_rows(data: np.ndarray, type: GGUFType, name: str = "tensor", *, exact: bool = True) -> Dense | GGUFRows:
    """View whole rows; quantised ones are unpacked later, after they have been selected, reordered or concatenated.

    Args:
        data, type, name, exact: as for :func:`unpack_rows`.

    Raises:
        UnsupportedModelError: the type is not one of ``SUPPORTED_TYPES``.
    """
    if type in DENSE_DTYPES:
        return Dense(to_dense(data, type))
    if type in QUANTIZED_TYPES:
        return GGUFRows.of(data, type, exact)
    supported = ", ".join(known.name for known in SUPPORTED_TYPES)
    raise UnsupportedModelError(f"tensor {name!r} is stored as {type.name}; supported are {supported}")


def to_dense(data: np.ndarray, type: GGUFType) -> Tensor:
    """View rows of F32, F16 or BF16 as [rows, cols]; no copy if ``data`` is contiguous."""
    return torch.from_numpy(np.ascontiguousarray(data)).view(DENSE_DTYPES[type])
