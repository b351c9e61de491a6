"""A layer's weight, in one of the few packed forms that the kernels read; layers never know the file's format."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from fastinfer import ops
from fastinfer.formats.gguf_dequant import Dense, Int4, Int8


class Weight(ABC):
    """[out_features, in_features], whatever its form."""

    out_features: int

    @abstractmethod
    def linear(
        self,
        x: Tensor,
        *,
        norm_weight: Tensor | None = None,
        eps: float = 0.0,
        activation: str | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """``x @ weight.T`` with what is fused around it; see :mod:`fastinfer.ops.gemm` for the arguments."""

    def split_linear(self, x: Tensor, sizes: list[int], *, norm_weight: Tensor, eps: float) -> tuple[Tensor, ...]:
        """:meth:`linear` in runs of so many columns; their rows may be strided."""
        return self.linear(x, norm_weight=norm_weight, eps=eps).split(sizes, dim=-1)

    @abstractmethod
    def rows(self, ids: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Rows by index (an embedding's token ids), or all for ``None``, as [n, in_features]."""


@dataclass(frozen=True, eq=False)
class DenseWeight(Weight):
    """Not quantised; ``values`` is [out_features, in_features]."""

    values: Tensor

    @property
    def out_features(self) -> int:  # type: ignore[override]
        return self.values.shape[0]

    def linear(
        self,
        x: Tensor,
        *,
        norm_weight: Tensor | None = None,
        eps: float = 0.0,
        activation: str | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        return ops.gemm(x, self.values, norm_weight=norm_weight, eps=eps, activation=activation, residual=residual)

    def rows(self, ids: Tensor | None, dtype: torch.dtype) -> Tensor:
        return (self.values if ids is None else ops.embedding(self.values, ids)).to(dtype)


@dataclass(frozen=True, eq=False)
class QuantizedWeight(Weight):
    """4 or 8 bits with scales per group.

    Attributes:
        bits: 4 or 8.
        qweight, scales, mins: packed, see :mod:`fastinfer.ops.pack`.
        out_features: rows before padding.
        activation_bits: precision of the input in products, see :func:`fastinfer.ops.int8_gemm`.
    """

    bits: int
    qweight: Tensor
    scales: Tensor
    mins: Tensor | None
    out_features: int
    activation_bits: int

    def linear(
        self,
        x: Tensor,
        *,
        norm_weight: Tensor | None = None,
        eps: float = 0.0,
        activation: str | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        gemm = ops.int4_gemm if self.bits == 4 else ops.int8_gemm
        return gemm(
            x,
            self.qweight,
            self.scales,
            self.mins,
            self.out_features,
            norm_weight=norm_weight,
            eps=eps,
            activation=activation,
            residual=residual,
            activation_bits=self.activation_bits,
        )

    def rows(self, ids: Tensor | None, dtype: torch.dtype) -> Tensor:
        dequantize = ops.int4_dequantize if self.bits == 4 else ops.int8_dequantize
        return dequantize(self.qweight, self.scales, self.mins, self.out_features, ids, dtype)


@dataclass(frozen=True, eq=False)
class ConcatenatedWeight(Weight):
    """Weights of different forms that share their input, side by side: a Q4 query beside a Q6 value, for instance."""

    parts: tuple[Weight, ...]

    @property
    def out_features(self) -> int:  # type: ignore[override]
        return sum(part.out_features for part in self.parts)

    def linear(
        self,
        x: Tensor,
        *,
        norm_weight: Tensor | None = None,
        eps: float = 0.0,
        activation: str | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        if activation is not None or residual is not None:
            raise ValueError("a concatenated weight takes neither activation nor residual")
        return torch.cat([part.linear(x, norm_weight=norm_weight, eps=eps) for part in self.parts], dim=-1)

    def split_linear(self, x: Tensor, sizes: list[int], *, norm_weight: Tensor, eps: float) -> tuple[Tensor, ...]:
        """Without a copy, as the parts are what is asked for."""
        if sizes != [part.out_features for part in self.parts]:
            raise ValueError(f"sizes must be those of the parts, got {sizes}")
        return tuple(part.linear(x, norm_weight=norm_weight, eps=eps) for part in self.parts)

    def rows(self, ids: Tensor | None, dtype: torch.dtype) -> Tensor:
        if ids is not None:
            raise ValueError("a concatenated weight is no embedding: it yields all rows only")
        return torch.cat([part.rows(None, dtype) for part in self.parts])


def make_weight(
    unpacked: Dense | Int4 | Int8,
    activation_bits: int,
    device: str = "cpu",
    dense_dtype: torch.dtype | None = None,
) -> Weight:
    """The kernels' form of a weight that a reader has unpacked; no integer or scale is rounded.

    Args:
        unpacked: in host memory.
        activation_bits: see :class:`QuantizedWeight`.
        device: that will use it: packed forms differ.
        dense_dtype: of a weight that is not quantised, where it must be that of the hidden states; ``None``: as it is.
    """
    if isinstance(unpacked, Dense):
        return DenseWeight(unpacked.values.to(device, dense_dtype))
    bits, pack = (4, ops.int4_pack) if isinstance(unpacked, Int4) else (8, ops.int8_pack)
    return QuantizedWeight(
        bits=bits,
        qweight=pack(unpacked.q.to(device)),
        scales=ops.pack_scales(unpacked.scales.to(device)),
        mins=None if unpacked.mins is None else ops.pack_scales(unpacked.mins.to(device)),
        out_features=unpacked.q.shape[0],
        activation_bits=activation_bits,
    )
