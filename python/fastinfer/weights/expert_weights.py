"""The weights of a layer's experts in one tensor, in one of the packed forms of :mod:`fastinfer.weights.weight`."""

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
    """[experts, out_features, in_features], whatever its form."""

    @abstractmethod
    def linear(self, x: Tensor, routing: ops.Routing, *, activation: str | None = None) -> Tensor:
        """Each row times the weight of its expert; see :func:`fastinfer.ops.grouped_gemm`."""


@dataclass(frozen=True, eq=False)
class DenseExperts(ExpertWeights):
    """Not quantised; ``values`` is [experts, out_features, in_features]."""

    values: Tensor

    def linear(self, x: Tensor, routing: ops.Routing, *, activation: str | None = None) -> Tensor:
        return ops.grouped_gemm(x, self.values, routing.row_ids, routing.expert_start, activation=activation)


@dataclass(frozen=True, eq=False)
class QuantizedExperts(ExpertWeights):
    """4 or 8 bits with scales per group.

    Attributes:
        bits: 4 or 8.
        qweight, scales, mins: packed, see :func:`fastinfer.ops.grouped_int8_gemm`.
        out_features: rows before padding.
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
    """4 bits that choose one of 16 values, with scales per group.

    Attributes:
        qweight, scales: packed, see :func:`fastinfer.ops.grouped_lut_gemm`.
        table: [16] fp32.
        out_features: rows before padding.
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
    """The kernels' form of the experts' weights; no integer or scale is rounded.

    Args:
        experts: one each, in host memory. Each is packed by itself: beside the result one expert's weight is needed.
        activation_bits: see :class:`QuantizedExperts`. Of a weight that was made for int8 activations it is the precision
            of the input too: nothing is rounded more coarsely than with 8.
        device: that will use it: packed forms differ.
        dense_dtype: of weights that are not quantised, where it must be that of the hidden states; ``None``: as they
            are.

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
        return DenseExperts(_stack(experts, lambda expert: expert.values.to(device, dense_dtype)))
    assert isinstance(first, Int4 | Int8 | Lut)
    if first.permutation is not None:
        raise UnsupportedModelError(
            "the experts of a layer must have their inputs in order, got permuted ones (desc_act)"
        )
    pack = ops.int8_pack if isinstance(first, Int8) else ops.int4_pack
    qweight = _stack(experts, lambda expert: pack(expert.q.to(device)))
    scales = _stack(experts, lambda expert: ops.pack_scales(expert.scales.to(device)))
    out_features, _ = first.shape
    if isinstance(first, Lut):
        assert first.table is not None
        return LutExperts(qweight, scales, first.table.to(device), out_features)
    mins = None if first.mins is None else _stack(experts, lambda expert: ops.pack_scales(expert.mins.to(device)))
    return QuantizedExperts(8 if isinstance(first, Int8) else 4, qweight, scales, mins, out_features, activation_bits)


def _stack(experts: Sequence[Unpacked], convert: Callable[[Any], Tensor]) -> Tensor:
    """``torch.stack`` of what ``convert`` returns, without having all of it twice."""
    first = convert(experts[0])
    stack = first.new_empty([len(experts), *first.shape])
    stack[0] = first
    for index in range(1, len(experts)):
        stack[index] = convert(experts[index])
    return stack


def _describe(weight: Unpacked) -> str:
    rows, columns = weight.shape
    return f"{type(weight).__name__} [{rows}, {columns}]"
