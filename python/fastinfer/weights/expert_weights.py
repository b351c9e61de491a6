"""Weights of all experts of a layer in one tensor, in the forms of :mod:`fastinfer.weights.weight`."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastinfer import ops
from fastinfer.errors import UnsupportedModelError
from fastinfer.formats.unpacked import Dense, Int4, Int8, Lut, Unpacked


class ExpertWeights(ABC):
    """Matrices [experts, out_features, in_features] in any form."""

    @abstractmethod
    def linear(self, x: Tensor, routing: ops.Routing, *, activation: str | None = None) -> Tensor:
        """Multiply each row by the weight of its expert; see :func:`fastinfer.ops.grouped_gemm`."""


@dataclass(frozen=True, eq=False)
class DenseExperts(ExpertWeights):
    """Experts whose weights are not quantised; ``values`` is [experts, out_features, in_features]."""

    values: Tensor

    def linear(self, x: Tensor, routing: ops.Routing, *, activation: str | None = None) -> Tensor:
        return ops.grouped_gemm(x, self.values, routing.row_ids, routing.expert_start, activation=activation)


@dataclass(frozen=True, eq=False)
class QuantizedExperts(ExpertWeights):
    """Experts with 4-bit or 8-bit integers, and a scale and an optional minimum per group of inputs.

    Attributes:
        bits: 4 or 8.
        qweight, scales, mins: packed tensors, see :func:`fastinfer.ops.grouped_int8_gemm`.
        out_features: number of rows of an expert before padding.
        activation_bits: precision of the input in products, see :func:`fastinfer.ops.int8_gemm`.
    """

    bits: int
    qweight: Tensor
    scales: Tensor
    mins: Tensor | None
    out_features: int
    activation_bits: int

    def linear(self, x: Tensor, routing: ops.Routing, *, activation: str | None = None) -> Tensor:
        gemm = ops.grouped_int4_gemm if self.bits == 4 else ops.grouped_int8_gemm
        return gemm(
            x,
            self.qweight,
            self.scales,
            self.mins,
            self.out_features,
            routing.row_ids,
            routing.expert_start,
            activation=activation,
            activation_bits=self.activation_bits,
        )


@dataclass(frozen=True, eq=False)
class LutExperts(ExpertWeights):
    """Experts with 4-bit indices into a look-up table of 16 values, and a scale per group of inputs.

    Attributes:
        qweight, scales: packed tensors, see :func:`fastinfer.ops.grouped_lut_gemm`.
        table: [16] fp32, the look-up table.
        out_features: number of rows of an expert before padding.
    """

    qweight: Tensor
    scales: Tensor
    table: Tensor
    out_features: int

    def linear(self, x: Tensor, routing: ops.Routing, *, activation: str | None = None) -> Tensor:
        return ops.grouped_lut_gemm(
            x,
            self.qweight,
            self.scales,
            self.table,
            self.out_features,
            routing.row_ids,
            routing.expert_start,
            activation=activation,
        )


def make_expert_weights(
    experts: Sequence[Unpacked],
    activation_bits: int,
    device: str = "cpu",
    dense_dtype: torch.dtype | None = None,
) -> ExpertWeights:
    """Pack the experts' weights for the kernels; no integer or scale is rounded.

    Args:
        experts: weight of each expert, in host memory. They are packed one after another, so that only the result and
            one more packed expert are in memory.
        activation_bits: precision of the input in products, see :class:`QuantizedExperts`. It also applies to weights
            that were made for int8 activations, as there is no W8A8 product for experts.
        device: device that will use the weights; the packed forms of CPU and GPU differ.
        dense_dtype: dtype to convert weights to that are not quantised; ``None`` to keep the checkpoint's dtype.

    Raises:
        UnsupportedModelError: the experts differ in form, shape or group size, or their inputs are permuted.
    """
    first = experts[0]
    for index, expert in enumerate(experts):
        if not first.fits(expert) or expert.shape != first.shape:
            raise UnsupportedModelError(
                f"the experts of a layer must have weights of one form and shape, got {_describe(first)} for expert 0 "
                f"and {_describe(expert)} for expert {index}"
            )
    if isinstance(first, Dense):
        return DenseExperts(_join(experts, lambda expert: expert.values.to(device, dense_dtype)))
    assert isinstance(first, Int4 | Int8 | Lut)
    if first.permutation is not None:
        raise UnsupportedModelError(
            "the experts of a layer must have their inputs in order, got permuted ones (desc_act)"
        )
    pack = ops.int8_pack if isinstance(first, Int8) else ops.int4_pack
    qweight = _join(experts, lambda expert: pack(expert.q.to(device)))
    scales = _join(experts, lambda expert: ops.pack_scales(expert.scales.to(device)))
    out_features, _ = first.shape
    if isinstance(first, Lut):
        assert first.table is not None
        return LutExperts(qweight, scales, first.table.to(device), out_features)
    mins = None if first.mins is None else _join(experts, lambda expert: ops.pack_scales(expert.mins.to(device)))
    return QuantizedExperts(8 if isinstance(first, Int8) else 4, qweight, scales, mins, out_features, activation_bits)


def _join(experts: Sequence[Unpacked], convert: Callable[[Any], Tensor]) -> Tensor:
    """Convert each expert into one tensor [experts, ...]; unlike with torch.stack, no second copy is in memory."""
    first = convert(experts[0])
    joined = first.new_empty([len(experts), *first.shape])
    joined[0] = first
    for index in range(1, len(experts)):
        joined[index] = convert(experts[index])
    return joined


def _describe(weight: Unpacked) -> str:
    rows, columns = weight.shape
    return f"{type(weight).__name__} [{rows}, {columns}]"
