"""Weights of all experts of a layer in one tensor, in the forms of :mod:`fastinfer.weights.weight`."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastinfer import ops
from fastinfer.errors import UnsupportedModelError
from fastinfer.formats.gguf_rows import GGUFRows
from fastinfer.formats.unpacked import Dense, Grouped, Lut, Unpacked
from fastinfer.ops.pack import TILE_ROWS
from fastinfer.utils.huge_pages import HugePages
from fastinfer.weights.pack import PackedTiles, packed_bits
from fastinfer.weights.weight import Weight


class ExpertWeights(ABC):
    """Matrices [experts, out_features, in_features] in any form, with an optional bias of [experts, out_features]."""

    def gather_input(self, x: Tensor) -> Tensor:
        """Return the input of :meth:`linear`, see :meth:`fastinfer.weights.weight.Weight.gather_input`."""
        return x

    @abstractmethod
    def linear(self, x: Tensor, routing: ops.Routing | ops.HeadRows, *, activation: str | None = None) -> Tensor:
        """Multiply each row by the weight of its expert, and add the bias; see :func:`fastinfer.ops.grouped_gemm`."""

    def own_residual(self, residual: Tensor | None) -> Tensor | None:
        """Return what is added to the rows that this process computes: ``residual``, unless others add it."""
        return residual

    def combine(
        self,
        rows: Tensor,
        routing: ops.Routing,
        addend: Tensor | None,
        residual: Tensor | None = None,
        projection: Weight | None = None,
    ) -> Tensor:
        """Add up each token's rows of all experts, and the residual.

        Args:
            rows: [tokens * top_k, width], result of :meth:`linear`.
            routing: experts of the tokens.
            addend: [tokens, hidden], ``own_residual(residual)`` and what else this process adds; ``None`` for nothing.
            residual: [tokens, hidden], the residual stream, which may become the result; ``None`` for none.
            projection: [hidden, width], by which the sum is multiplied; ``None`` if ``width`` is ``hidden``.

        Returns:
            [tokens, hidden].
        """
        if projection is None:
            return ops.combine_experts(rows, routing.expert_weights, addend)
        return projection.linear(ops.combine_experts(rows, routing.expert_weights, None), residual=addend)


@dataclass(frozen=True, eq=False)
class DenseExperts(ExpertWeights):
    """Experts whose weights are not quantised.

    Attributes:
        values: [experts, out_features, in_features].
        bias: [experts, out_features], or ``None``.
    """

    values: Tensor
    bias: Tensor | None = None

    def linear(self, x: Tensor, routing: ops.Routing | ops.HeadRows, *, activation: str | None = None) -> Tensor:
        return ops.grouped_gemm(
            x, self.values, routing.row_ids, routing.expert_start, bias=self.bias, activation=activation
        )


@dataclass(frozen=True, eq=False)
class QuantizedExperts(ExpertWeights):
    """Experts with integers of 4, 5, 6 or 8 bits, and a scale and an optional minimum per group of inputs.

    Attributes:
        bits: 4, 5, 6 or 8.
        qweight, scales, mins: packed tensors, see :func:`fastinfer.ops.grouped_int8_gemm`.
        out_features: number of rows of an expert before padding.
        activation_bits: precision of the input in products, see :func:`fastinfer.ops.int8_gemm`.
        bias: [experts, out_features], or ``None``.
    """

    bits: int
    qweight: Tensor
    scales: Tensor
    mins: Tensor | None
    out_features: int
    activation_bits: int
    bias: Tensor | None = None

    def linear(self, x: Tensor, routing: ops.Routing | ops.HeadRows, *, activation: str | None = None) -> Tensor:
        if self.bits == 6:
            return ops.grouped_int6_gemm(
                x,
                self.qweight,
                self.scales,
                self.out_features,
                routing.row_ids,
                routing.expert_start,
                bias=self.bias,
                activation=activation,
                activation_bits=self.activation_bits,
            )
        gemm = {4: ops.grouped_int4_gemm, 5: ops.grouped_int5_gemm, 8: ops.grouped_int8_gemm}[self.bits]
        return gemm(
            x,
            self.qweight,
            self.scales,
            self.mins,
            self.out_features,
            routing.row_ids,
            routing.expert_start,
            bias=self.bias,
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
        activation_bits: precision of the input in products, see :func:`fastinfer.ops.lut_gemm`.
        bias: [experts, out_features], or ``None``.
    """

    qweight: Tensor
    scales: Tensor
    table: Tensor
    out_features: int
    activation_bits: int
    bias: Tensor | None = None

    def linear(self, x: Tensor, routing: ops.Routing | ops.HeadRows, *, activation: str | None = None) -> Tensor:
        return ops.grouped_lut_gemm(
            x,
            self.qweight,
            self.scales,
            self.table,
            self.out_features,
            routing.row_ids,
            routing.expert_start,
            bias=self.bias,
            activation=activation,
            activation_bits=self.activation_bits,
        )


def make_expert_weights(
    experts: Sequence[Unpacked],
    activation_bits: int,
    device: str = "cpu",
    dense_dtype: torch.dtype | None = None,
    bias: Tensor | None = None,
    memory: HugePages | None = None,
) -> ExpertWeights:
    """Pack the experts' weights for the kernels; no integer or scale is rounded.

    Args:
        experts: weight of each expert, in host memory. They are packed one after another, so that only the result and
            one more packed expert are in memory.
        activation_bits: precision of the input in products, see :func:`fastinfer.weights.pack.make_weight`. It also
            applies to weights that were made for int8 activations, as there is no W8A8 product for experts.
        device: device that will use the weights; the packed forms of CPU and GPU differ.
        dense_dtype: dtype to convert weights to that are not quantised; ``None`` to keep the checkpoint's dtype.
        bias: [experts, out_features] fp32, or ``None``.
        memory: allocator for the stacked tensors (CPU only); ``None`` for torch's own.

    Raises:
        UnsupportedModelError: the experts differ in form, shape or group size, or their inputs are permuted.
    """
    first = experts[0]
    bias = None if bias is None else bias.to(device)
    for index, expert in enumerate(experts):
        same_bits = packed_bits(expert, device) == packed_bits(first, device)
        if not first.fits(expert) or not same_bits or expert.shape != first.shape:
            raise UnsupportedModelError(
                f"the experts of a layer must have weights of one form and shape, got {_describe(first)} for expert 0 "
                f"and {_describe(expert)} for expert {index}"
            )
    form = first.form if isinstance(first, GGUFRows) else first
    bits = packed_bits(first, device)
    if not bits:
        return DenseExperts(_stack_dense(experts, device, dense_dtype, memory), bias)
    if isinstance(form, Grouped) and form.permutation is not None:
        raise UnsupportedModelError(
            "the experts of a layer must have their inputs in order, got permuted ones (desc_act)"
        )
    out_features, _ = first.shape
    tiles = PackedTiles(len(experts) * -(-out_features // TILE_ROWS), device, memory)
    for expert in experts:
        tiles.append(expert)
    qweight, scales, mins = (
        None if packed is None else packed.unflatten(0, (len(experts), -1))
        for packed in (tiles.qweight, tiles.scales, tiles.mins)
    )
    assert qweight is not None
    assert scales is not None
    if isinstance(form, Lut):
        assert form.table is not None
        table = form.table.to(device, copy=True)
        lut_bits = 32 if form.int8_table is None else activation_bits
        return LutExperts(qweight, scales, table, out_features, lut_bits, bias)
    return QuantizedExperts(bits, qweight, scales, mins, out_features, activation_bits, bias)


def _stack_dense(
    experts: Sequence[Unpacked], device: str, dtype: torch.dtype | None, memory: HugePages | None
) -> Tensor:
    """Stack dense experts as [experts, rows, cols]; unlike with torch.stack, no second copy is in memory."""
    stacked = None
    for index, expert in enumerate(experts):
        dense = expert.unpack() if isinstance(expert, GGUFRows) else expert
        assert isinstance(dense, Dense)
        values = dense.values.to(device, dtype)
        if stacked is None:
            shape = len(experts), *values.shape
            stacked = values.new_empty(shape) if memory is None else memory.empty(shape, values.dtype)
        stacked[index] = values
    assert stacked is not None
    return stacked


def _describe(weight: Unpacked) -> str:
    rows, columns = weight.shape
    return f"{weight.kind} [{rows}, {columns}]"
