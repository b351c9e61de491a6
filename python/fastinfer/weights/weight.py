"""Weights of linear layers and embeddings, one class for each form that the kernels read.

Layers call :meth:`Weight.linear` and do not know the format of the checkpoint.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor
from typing_extensions import Unpack

from fastinfer import ops


class NormOptions(TypedDict, total=False):
    """Arguments of the norm that a product fuses; see :mod:`fastinfer.ops.gemm`."""

    norm_weight: Tensor
    eps: float


class LinearOptions(NormOptions, total=False):
    """Arguments of everything that a product fuses; see :mod:`fastinfer.ops.gemm`."""

    activation: str
    residual: Tensor | None


class Weight(ABC):
    """Matrix [out_features, in_features] in any form, with an optional bias."""

    out_features: int

    def gather_input(self, x: Tensor) -> Tensor:
        """Return the input of :meth:`linear`: ``x``, unless processes share the weight and ``x`` has some columns."""
        return x

    @abstractmethod
    def linear(self, x: Tensor, **options: Unpack[LinearOptions]) -> Tensor:
        """Compute ``x @ weight.T + bias``, with a fused norm, activation or residual."""

    def split_linear(self, x: Tensor, sizes: list[int], **options: Unpack[NormOptions]) -> tuple[Tensor, ...]:
        """Compute :meth:`linear` and split the result into column ranges of these sizes; their rows may be strided."""
        parts: tuple[Tensor, ...] = self.linear(x, **options).split(sizes, dim=-1)
        return parts

    @abstractmethod
    def rows(self, ids: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Look up rows by index (the token ids of an embedding), or all rows for ``None``: [n, in_features]."""


@dataclass(frozen=True, eq=False)
class DenseWeight(Weight):
    """Weight that is not quantised; ``values`` is [out_features, in_features]."""

    values: Tensor
    bias: Tensor | None = None

    @property
    def out_features(self) -> int:  # type: ignore[override]
        return self.values.shape[0]

    def linear(self, x: Tensor, **options: Unpack[LinearOptions]) -> Tensor:
        if x.dtype == self.values.dtype == torch.bfloat16 and not x.is_cuda:
            x = apply_norm(x, options)  # a fused norm has fp32 products, which take twice the time of bf16's
        return ops.gemm(x, self.values, bias=self.bias, **options)

    def rows(self, ids: Tensor | None, dtype: torch.dtype) -> Tensor:
        return self.values.to(dtype) if ids is None else ops.embedding(self.values, ids, dtype=dtype)


@dataclass(frozen=True, eq=False)
class QuantizedWeight(Weight):
    """Weight of integers of 4, 5, 6 or 8 bits, with a scale and an optional minimum per group of inputs.

    Attributes:
        bits: 4, 5, 6 or 8.
        qweight, scales, mins: packed tensors, see :mod:`fastinfer.ops.pack`. With 6 bits there are no minimums.
        out_features: number of rows before padding.
        activation_bits: precision of the input in products, see :func:`fastinfer.ops.int8_gemm`.
        bias: [out_features], or ``None``.
        permutation: [in_features] int64; column j of the weight belongs to input ``permutation[j]``. ``None`` if the
            columns are in the order of the inputs.
    """

    bits: int
    qweight: Tensor
    scales: Tensor
    mins: Tensor | None
    out_features: int
    activation_bits: int
    bias: Tensor | None = None
    permutation: Tensor | None = None

    def linear(self, x: Tensor, **options: Unpack[LinearOptions]) -> Tensor:
        if self.permutation is not None:
            x = ops.permute_columns(apply_norm(x, options), self.permutation)
        if self.bits == 6:
            return ops.int6_gemm(
                x,
                self.qweight,
                self.scales,
                self.out_features,
                bias=self.bias,
                activation_bits=self.activation_bits,
                **options,
            )
        gemm = {4: ops.int4_gemm, 5: ops.int5_gemm, 8: ops.int8_gemm}[self.bits]
        return gemm(
            x,
            self.qweight,
            self.scales,
            self.mins,
            self.out_features,
            bias=self.bias,
            activation_bits=self.activation_bits,
            **options,
        )

    def rows(self, ids: Tensor | None, dtype: torch.dtype) -> Tensor:
        if self.bits == 6:
            return ops.int6_dequantize(self.qweight, self.scales, self.out_features, ids, dtype)
        dequantize = {4: ops.int4_dequantize, 5: ops.int5_dequantize, 8: ops.int8_dequantize}[self.bits]
        values = dequantize(self.qweight, self.scales, self.mins, self.out_features, ids, dtype)
        return values if self.permutation is None else values[:, self.permutation.argsort()]


@dataclass(frozen=True, eq=False)
class LutWeight(Weight):
    """Weight of 4-bit indices into a look-up table of 16 values, with a scale per group of inputs.

    Attributes:
        qweight, scales: packed tensors, see :mod:`fastinfer.ops.pack`.
        table: [16] fp32, the look-up table.
        out_features: number of rows before padding.
        activation_bits: precision of the input in products, see :func:`fastinfer.ops.lut_gemm`.
        bias: [out_features], or ``None``.
    """

    qweight: Tensor
    scales: Tensor
    table: Tensor
    out_features: int
    activation_bits: int
    bias: Tensor | None = None

    def linear(self, x: Tensor, **options: Unpack[LinearOptions]) -> Tensor:
        return ops.lut_gemm(
            x,
            self.qweight,
            self.scales,
            self.table,
            self.out_features,
            bias=self.bias,
            activation_bits=self.activation_bits,
            **options,
        )

    def rows(self, ids: Tensor | None, dtype: torch.dtype) -> Tensor:
        if ids is not None:
            raise ValueError("a look-up table weight cannot be an embedding: ids must be None, got a tensor")
        ones = torch.ones_like(self.scales)
        q = ops.int4_dequantize(self.qweight, ones, torch.zeros_like(ones), self.out_features, None, torch.float32)
        scales = self.scales.transpose(1, 2).reshape(-1, self.scales.shape[1])[: self.out_features].float()
        levels = self.table[q.long()].unflatten(1, (scales.shape[1], -1))
        rows: Tensor = (levels * scales[..., None]).flatten(1).to(dtype)
        return rows


@dataclass(frozen=True, eq=False)
class W8A8Weight(Weight):
    """Weight of 8-bit integers with a scale per row, for inputs that are quantised to int8 with a scale per token.

    Attributes:
        qweight, scales: packed tensors, see :mod:`fastinfer.ops.pack`.
        out_features: number of rows before padding.
        bias: [out_features], or ``None``.
    """

    qweight: Tensor
    scales: Tensor
    out_features: int
    bias: Tensor | None = None

    def linear(self, x: Tensor, **options: Unpack[LinearOptions]) -> Tensor:
        if "norm_weight" in options:
            q, x_scales = ops.rms_norm_quantize(x, None, options["norm_weight"], options["eps"])
        else:
            q, x_scales = ops.quantize_int8(x)
        return ops.w8a8_gemm(
            q,
            x_scales,
            self.qweight,
            self.scales,
            self.out_features,
            bias=self.bias,
            activation=options.get("activation"),
            residual=options.get("residual"),
            dtype=x.dtype,
        )

    def rows(self, ids: Tensor | None, dtype: torch.dtype) -> Tensor:
        return ops.int8_dequantize(self.qweight, self.scales, None, self.out_features, ids, dtype)


@dataclass(frozen=True, eq=False)
class ConcatenatedWeight(Weight):
    """Weights of different forms with the same input, whose outputs are concatenated: Q4 queries and Q6 values, say."""

    parts: tuple[Weight, ...]

    @property
    def out_features(self) -> int:  # type: ignore[override]
        return sum(part.out_features for part in self.parts)

    def linear(self, x: Tensor, **options: Unpack[LinearOptions]) -> Tensor:
        if "activation" in options or "residual" in options:
            given = " and ".join(name for name in ("activation", "residual") if name in options)
            raise ValueError(f"a concatenated weight supports neither activation nor residual, got {given}")
        return torch.cat([part.linear(x, **options) for part in self.parts], dim=-1)

    def split_linear(self, x: Tensor, sizes: list[int], **options: Unpack[NormOptions]) -> tuple[Tensor, ...]:
        """Return the outputs of the parts, without a copy; ``sizes`` must be the sizes of the parts."""
        if sizes != [part.out_features for part in self.parts]:
            expected = [part.out_features for part in self.parts]
            raise ValueError(f"sizes must be those of the parts, {expected}, got {sizes}")
        return tuple(part.linear(x, **options) for part in self.parts)

    def rows(self, ids: Tensor | None, dtype: torch.dtype) -> Tensor:
        if ids is not None:
            raise ValueError("a concatenated weight cannot be an embedding: ids must be None, got a tensor")
        return torch.cat([part.rows(None, dtype) for part in self.parts])


def apply_norm(x: Tensor, options: LinearOptions) -> Tensor:
    """Apply the norm in ``options`` to the input, and remove it from ``options``."""
    if "norm_weight" not in options:
        return x
    return ops.rms_norm(x, options.pop("norm_weight"), options.pop("eps"))
