"""A layer's weight, in one of the few packed forms that the kernels read; layers never know the file's format."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor
from typing_extensions import Unpack

from fastinfer import ops
from fastinfer.formats.unpacked import Dense, Int4, Int8, Lut, Unpacked
from fastinfer.ops.pack import TILE_ROWS
from fastinfer.utils.huge_pages import HugePages


class NormOptions(TypedDict, total=False):
    """The norm that a product fuses in; see :mod:`fastinfer.ops.gemm`."""

    norm_weight: Tensor
    eps: float


class LinearOptions(NormOptions, total=False):
    """All that a product fuses in; see :mod:`fastinfer.ops.gemm`."""

    activation: str
    residual: Tensor | None


class Weight(ABC):
    """[out_features, in_features], whatever its form, and perhaps a bias."""

    out_features: int

    @abstractmethod
    def linear(self, x: Tensor, **options: Unpack[LinearOptions]) -> Tensor:
        """``x @ weight.T + bias`` with what is fused around it."""

    def split_linear(self, x: Tensor, sizes: list[int], **options: Unpack[NormOptions]) -> tuple[Tensor, ...]:
        """:meth:`linear` in runs of so many columns; their rows may be strided."""
        return self.linear(x, **options).split(sizes, dim=-1)

    @abstractmethod
    def rows(self, ids: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Rows by index (an embedding's token ids), or all for ``None``, as [n, in_features]."""


@dataclass(frozen=True, eq=False)
class DenseWeight(Weight):
    """Not quantised; ``values`` is [out_features, in_features]."""

    values: Tensor
    bias: Tensor | None = None

    @property
    def out_features(self) -> int:  # type: ignore[override]
        return self.values.shape[0]

    def linear(self, x: Tensor, **options: Unpack[LinearOptions]) -> Tensor:
        return ops.gemm(x, self.values, bias=self.bias, **options)

    def rows(self, ids: Tensor | None, dtype: torch.dtype) -> Tensor:
        return self.values.to(dtype) if ids is None else ops.embedding(self.values, ids, dtype=dtype)


@dataclass(frozen=True, eq=False)
class QuantizedWeight(Weight):
    """4 or 8 bits with scales per group.

    Attributes:
        bits: 4 or 8.
        qweight, scales, mins: packed, see :mod:`fastinfer.ops.pack`.
        out_features: rows before padding.
        activation_bits: precision of the input in products, see :func:`fastinfer.ops.int8_gemm`.
        bias: [out_features].
        permutation: [in_features] int64, order in which the weight takes its inputs; ``None`` for theirs.
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
            x = ops.permute_columns(normalized(x, options), self.permutation)
        gemm = ops.int4_gemm if self.bits == 4 else ops.int8_gemm
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
        dequantize = ops.int4_dequantize if self.bits == 4 else ops.int8_dequantize
        values = dequantize(self.qweight, self.scales, self.mins, self.out_features, ids, dtype)
        return values if self.permutation is None else values[:, self.permutation.argsort()]


@dataclass(frozen=True, eq=False)
class LutWeight(Weight):
    """4 bits that choose one of 16 values, with scales per group.

    Attributes:
        qweight, scales: packed, see :mod:`fastinfer.ops.pack`.
        table: [16] fp32.
        out_features: rows before padding.
        bias: [out_features].
    """

    qweight: Tensor
    scales: Tensor
    table: Tensor
    out_features: int
    bias: Tensor | None = None

    def linear(self, x: Tensor, **options: Unpack[LinearOptions]) -> Tensor:
        return ops.lut_gemm(x, self.qweight, self.scales, self.table, self.out_features, bias=self.bias, **options)

    def rows(self, ids: Tensor | None, dtype: torch.dtype) -> Tensor:
        if ids is not None:
            raise ValueError("a table weight is no embedding: it yields all rows only")
        ones = torch.ones_like(self.scales)
        q = ops.int4_dequantize(self.qweight, ones, torch.zeros_like(ones), self.out_features, None, torch.float32)
        scales = self.scales.transpose(1, 2).reshape(-1, self.scales.shape[1])[: self.out_features].float()
        levels = self.table[q.long()].unflatten(1, (scales.shape[1], -1))
        return (levels * scales[..., None]).flatten(1).to(dtype)


@dataclass(frozen=True, eq=False)
class W8A8Weight(Weight):
    """8 bits with a scale per row, for inputs that are rounded to int8 with a scale per token.

    Attributes:
        qweight, scales: packed, see :mod:`fastinfer.ops.pack`.
        out_features: rows before padding.
        bias: [out_features].
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
    """Weights of different forms that share their input, side by side: a Q4 query beside a Q6 value, for instance."""

    parts: tuple[Weight, ...]

    @property
    def out_features(self) -> int:  # type: ignore[override]
        return sum(part.out_features for part in self.parts)

    def linear(self, x: Tensor, **options: Unpack[LinearOptions]) -> Tensor:
        if "activation" in options or "residual" in options:
            raise ValueError("a concatenated weight takes neither activation nor residual")
        return torch.cat([part.linear(x, **options) for part in self.parts], dim=-1)

    def split_linear(self, x: Tensor, sizes: list[int], **options: Unpack[NormOptions]) -> tuple[Tensor, ...]:
        """Without a copy, as the parts are what is asked for."""
        if sizes != [part.out_features for part in self.parts]:
            raise ValueError(f"sizes must be those of the parts, got {sizes}")
        return tuple(part.linear(x, **options) for part in self.parts)

    def rows(self, ids: Tensor | None, dtype: torch.dtype) -> Tensor:
        if ids is not None:
            raise ValueError("a concatenated weight is no embedding: it yields all rows only")
        return torch.cat([part.rows(None, dtype) for part in self.parts])


def normalized(x: Tensor, options: LinearOptions) -> Tensor:
    """The input after the norm, which is taken out of the options."""
    if "norm_weight" not in options:
        return x
    return ops.rms_norm(x, options.pop("norm_weight"), options.pop("eps"))


def make_weight(
    unpacked: Unpacked | Iterable[Unpacked],
    activation_bits: int,
    device: str = "cpu",
    dense_dtype: torch.dtype | None = None,
    bias: Tensor | None = None,
    memory: HugePages | None = None,
    out_features: int | None = None,
) -> Weight:
    """The kernels' form of a weight that a reader has unpacked; no integer or scale is rounded.

    Args:
        unpacked: in host memory; or runs of its rows, multiples of 16 but for the last, that need not be there at once.
        activation_bits: see :class:`QuantizedWeight`.
        device: that will use it: packed forms differ.
        dense_dtype: of a weight that is not quantised, where it must be that of the hidden states; ``None``: as it is.
        bias: [out_features] fp32.
        memory: where packed forms shall lie, on a CPU.
        out_features: how many rows the runs have.

    Raises:
        ValueError: the runs of rows have several forms, or one but the last no multiple of 16 rows, or are not as many
            rows as ``out_features`` says.
    """
    bias = None if bias is None else bias.to(device)
    if isinstance(unpacked, Unpacked):
        out_features = unpacked.shape[0]
    assert out_features is not None
    tiles, num_rows = -(-out_features // TILE_ROWS), 0
    values: list[Tensor] = []
    qweight, scales, mins = (_Tiles(tiles, memory) for _ in range(3))
    forms = set()
    for part in (unpacked,) if isinstance(unpacked, Unpacked) else unpacked:
        forms.add((type(part), getattr(part, "mins", None) is None))
        if len(forms) > 1 or num_rows % TILE_ROWS or num_rows + part.shape[0] > out_features:
            raise ValueError(
                f"runs must have one form, fill {out_features} rows and have, but for the last, a multiple of "
                f"{TILE_ROWS}, got {type(part).__name__} of {part.shape[0]} rows after {num_rows}"
            )
        num_rows += part.shape[0]
        if isinstance(part, Dense):
            values.append(part.values.to(device, dense_dtype))
            continue
        assert isinstance(part, Int4 | Int8 | Lut)
        if isinstance(part, Int8):
            qweight.add(ops.int8_pack, part.q.to(device), (part.shape[1] // 32, 8, TILE_ROWS, 4))
        else:
            qweight.add(ops.int4_pack, part.q.to(device), (part.shape[1] // 32, 4, TILE_ROWS, 4))
        scales.add(ops.pack_scales, part.scales.to(device), (part.scales.shape[1], TILE_ROWS))
        if part.mins is not None:
            mins.add(ops.pack_scales, part.mins.to(device), (part.mins.shape[1], TILE_ROWS))
    if num_rows != out_features:
        raise ValueError(f"runs must fill {out_features} rows, got {num_rows}")
    if values:
        return DenseWeight(values[0] if len(values) == 1 else torch.cat(values), bias)
    assert isinstance(part, Int4 | Int8 | Lut)
    if isinstance(part, Lut):
        assert part.table is not None
        return LutWeight(qweight.all, scales.all, part.table.to(device), out_features, bias)
    if isinstance(part, Int8) and part.int8_activations:
        return W8A8Weight(qweight.all, scales.all, out_features, bias)
    return QuantizedWeight(
        bits=8 if isinstance(part, Int8) else 4,
        qweight=qweight.all,
        scales=scales.all,
        mins=None if part.mins is None else mins.all,
        out_features=out_features,
        activation_bits=activation_bits,
        bias=bias,
        permutation=None if part.permutation is None else part.permutation.to(device),
    )


class _Tiles:
    """Runs of tiles, packed below each other as they come, so that none is in memory for longer than it takes.

    Args:
        count: of all tiles.
        memory: where they shall lie; ``None``: where torch puts them.

    Attributes:
        all: [count, ...], when all have come.
    """

    def __init__(self, count: int, memory: HugePages | None) -> None:
        self._count = count
        self._memory = memory
        self._filled = 0

    def add(self, pack: Callable[..., Tensor], rows: Tensor, shape: tuple[int, ...]) -> None:
        """Rows for as many tiles of this shape as they need, in the form that ``pack`` gives them."""
        if not self._filled:
            size = self._count, *shape
            self.all = rows.new_empty(size) if self._memory is None else self._memory.empty(size, rows.dtype)
        begin, self._filled = self._filled, self._filled - (-len(rows) // TILE_ROWS)
        pack(rows, out=self.all[begin : self._filled])
