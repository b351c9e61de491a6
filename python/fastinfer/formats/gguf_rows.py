"""Quantised rows of a GGUF file, which are unpacked or packed for the kernels straight from the file's blocks.

**Blocks of 32: Q4_0, Q4_1, IQ4_NL, Q5_0, Q5_1 and Q8_0.** A block has an fp16 scale, then (types ``_1``) an fp16
minimum, then (5 bits) the 32 fifth bits, then the integers. Nothing is rounded.

MXFP4 (:mod:`fastinfer.formats.mxfp4`) has an exponent in place of the scale. Its scales are fp16, or fp32 where an
exponent is beyond the range of fp16.

**Blocks of 256 in groups of 32: Q4_K and Q5_K.** A group has the scale ``d * scale`` and the minimum
``-dmin * minimum``; ``d`` and ``dmin`` are fp16 numbers of the block, ``scale`` and ``minimum`` have six bits. The
products have up to 17 bits, so they are exact in fp32 and rounded by at most 2^-11 of themselves in fp16. (Small ones
are not rounded at all: they are multiples of 2^-24, like the subnormal numbers of fp16.) IQ4_XS has such scales, no
minimums, and the table of IQ4_NL.

**Blocks of 256 whose weights are points of a grid, in groups of 32: IQ1_S, IQ2_XXS, IQ3_XXS and IQ3_S.** A byte or two
choose a point, which is the levels of four or eight weights. With their signs, or the sign of IQ1_S's offset, these are
at most 16 integers, so that the weight becomes a look-up table. Its scales are products, as in Q4_K. IQ3_S has the odd
numbers from -15 to 15, 2 q - 15: 4-bit integers with a minimum, which are faster with inputs of 8 bits.

**Blocks of one scale: TQ1_0, TQ2_0 (256), Q1_0 (128) and Q2_0 (64).** Their weights are integers from -1 to at most 2
times the scale, which each group of 32 gets. Nothing is rounded.

**Packed for a CPU, Q4_K, Q5_K and Q6_K keep their integers, scales and minimums as they are stored**: weights of 4, 5
and 6 bits with two-level scales (:func:`fastinfer.ops.pack_two_level_scales`). Nothing is rounded, and they take 4.625,
5.625 and 6.5625 bits a weight; in the file 4.5, 5.5 and 6.5625. Q5_0 and Q5_1 keep 5 bits, too, if all rows of the
weight do.

**Blocks of 256 in groups of 16: Q3_K, IQ1_M, IQ2_XS, IQ2_S (scale only), Q2_K (scale and minimum) and, for a GPU, Q6_K
(scale only).** The smallest group of the other forms is 32, so an exact weight is dense fp32. Otherwise two groups are
joined into one group of 8-bit integers:

- Q6_K and Q3_K: the joined scale is the larger of the two divided by 4 or 32. The integers of that group stay exact,
  and those of the other group are rounded to 1/4 or 1/32 of the larger step. (If the signs of the scales differ, the
  range is 127 instead of 128, because -32 * -4 would be 128.)
- IQ1_M, IQ2_XS and IQ2_S: the same, divided by 14, 2 and 2. Their largest integers are 9 and 43 of both signs.
- Q2_K: values are rounded to 1/127 of the largest value of the pair.

The joined scale is first rounded up to fp16. The added RMS error for random weights, relative to the error of the
format itself, is 0.24 for Q6_K, 0.03 for Q3_K and 0.02 for Q2_K. Errors add in square, so the total grows by 3 % for
Q6_K and by at most 0.1 % for the others.

Block layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. The readers, and the grids, are in
csrc/formats.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastinfer import _C
from fastinfer.formats.gguf_types import GGUFType
from fastinfer.formats.mxfp4 import MXFP4_TABLE
from fastinfer.formats.unpacked import Dense, Int4, Int8, Lut, Unpacked

GROUP = 32
ONE_SCALE_TYPES = (GGUFType.TQ1_0, GGUFType.TQ2_0, GGUFType.Q1_0, GGUFType.Q2_0)
INT4_TYPES = (GGUFType.Q4_0, GGUFType.Q4_1, GGUFType.Q4_K, GGUFType.IQ3_S, *ONE_SCALE_TYPES)
TYPES_WITH_MINS = (GGUFType.Q4_1, GGUFType.Q5_1, GGUFType.Q4_K, GGUFType.Q5_K, GGUFType.IQ3_S)
GRID_TYPES = (GGUFType.IQ1_S, GGUFType.IQ2_XXS, GGUFType.IQ3_XXS)
LUT_TYPES = (GGUFType.IQ4_NL, GGUFType.IQ4_XS, GGUFType.MXFP4, *GRID_TYPES)
GROUPS_OF_32 = (GGUFType.Q4_K, GGUFType.Q5_K, GGUFType.IQ4_XS, GGUFType.IQ3_S, *GRID_TYPES)
GROUPS_OF_16 = (GGUFType.Q6_K, GGUFType.Q3_K, GGUFType.Q2_K, GGUFType.IQ1_M, GGUFType.IQ2_XS, GGUFType.IQ2_S)
INT8_TYPES = (GGUFType.Q8_0, GGUFType.Q5_0, GGUFType.Q5_1, GGUFType.Q5_K, *GROUPS_OF_16)
FIVE_BIT_TYPES = (GGUFType.Q5_0, GGUFType.Q5_1)
TWO_LEVEL_BITS = {int(GGUFType.Q4_K): 4, int(GGUFType.Q5_K): 5, int(GGUFType.Q6_K): 6}
# Bits of a weight that keeps these scales on a CPU, scales and minimums included.
TWO_LEVEL_SIZES = {4: 4.625, 5: 5.625, 6: 6.5625}
QUANTIZED_TYPES = (*INT4_TYPES, *INT8_TYPES, *LUT_TYPES)

# Look-up table of IQ4_NL and IQ4_XS, for normally distributed weights.
IQ4_NL_TABLE = torch.tensor(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.float32
)


def _signed(*levels: int) -> Tensor:
    """Make the table of levels that have a sign in their fourth bit."""
    half = torch.tensor(levels + (0,) * (8 - len(levels)), dtype=torch.float32)
    return torch.cat([half, -half])


TABLES = {
    GGUFType.IQ4_NL: IQ4_NL_TABLE,
    GGUFType.IQ4_XS: IQ4_NL_TABLE,
    GGUFType.MXFP4: MXFP4_TABLE,
    # Eight times -1, 0 and 1 plus an offset of 1/8 or -1/8.
    GGUFType.IQ1_S: torch.tensor([-7, 1, 9, 0, 0, 0, 0, 0, -9, -1, 7, 0, 0, 0, 0, 0], dtype=torch.float32),
    GGUFType.IQ2_XXS: _signed(8, 25, 43),
    GGUFType.IQ3_XXS: _signed(4, 12, 20, 28, 36, 44, 52, 62),
}


@dataclass(frozen=True, eq=False)
class GGUFRows(Unpacked):
    """Weight whose rows are still in the blocks of a file; rows of several tensors may be combined.

    Attributes:
        offsets: [rows] int64, byte offset of each row in ``file``.
        types: [rows] uint8, storage type of each row.
        file: [bytes] uint8, contiguous.
        form: the unpacked weight without its rows, which has the dtypes that it usually has; its scales and minimums
            become fp32 where they do not fit into fp16.
    """

    offsets: Tensor
    types: Tensor
    file: np.ndarray
    form: Dense | Int4 | Int8 | Lut

    @classmethod
    def of(cls, data: np.ndarray, type: GGUFType, exact: bool) -> "GGUFRows":
        """View rows of one of the ``QUANTIZED_TYPES``.

        Args:
            data: [rows, row_bytes] uint8. If it is a view of a whole file, it can be combined with other views.
            type: storage type of the rows.
            exact: whether to unpack without any rounding; see :func:`fastinfer.formats.gguf_unpack.unpack_rows`.
        """
        data = data if data[:1].flags.c_contiguous else np.ascontiguousarray(data)
        file = data.base if isinstance(data.base, np.ndarray) else data
        rows, row_bytes = data.shape
        begin = data.ctypes.data - file.ctypes.data
        offsets = begin + torch.arange(rows) * data.strides[0]
        columns = row_bytes // type.block_bytes * type.block_size
        types = torch.full([rows], int(type), dtype=torch.uint8)
        return cls(offsets, types, file, _form(type, columns, exact))

    @property
    def packed_bits(self) -> float:
        """Bits of a weight that is packed for the kernels from unpacked rows, scales and minimums included."""
        if isinstance(self.form, Dense):
            return 32.0
        numbers = 1 if self.form.mins is None else 2
        return (8 if isinstance(self.form, Int8) else 4) + numbers * self.form.scales.itemsize * 8 / GROUP

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.offsets), self.form.shape[1]

    @property
    def kind(self) -> str:
        return f"Int{self.two_level_bits}" if self.two_level_bits else "Int5" if self.has_five_bits else self.form.kind

    @property
    def two_level_bits(self) -> int:
        """Bits of the integers, 4, 5 or 6, if all rows can be packed by :meth:`pack_two_level`; else 0."""
        types = self.types.unique()
        return TWO_LEVEL_BITS.get(int(types[0]), 0) if len(types) == 1 else 0

    @property
    def has_five_bits(self) -> bool:
        """Whether :meth:`pack` packs the integers in 5 bits, though they are unpacked to 8."""
        return all(type in FIVE_BIT_TYPES for type in self.types.unique().tolist())

    def dequantize(self) -> Tensor:
        return self.unpack().dequantize()

    def fits(self, other: Unpacked) -> bool:
        return isinstance(other, GGUFRows) and self.file is other.file and self.form.fits(other.form)

    def columns(self, index: Tensor) -> Unpacked:
        """Select inputs, see :meth:`fastinfer.formats.unpacked.Unpacked.columns`.

        Neighbours that are whole blocks of the file stay in its blocks; others are unpacked.
        """
        first, count, types = int(index[0]), len(index), self.types.unique()
        type = GGUFType(int(types[0]))
        is_run = torch.equal(index, torch.arange(first, first + count))
        if not is_run or len(types) > 1 or first % type.block_size or count % type.block_size:
            return self.unpack().columns(index)
        offsets = self.offsets + first // type.block_size * type.block_bytes
        return replace(self, offsets=offsets, form=self.form.columns(torch.arange(count)))

    def unpack_integers(self) -> Int8:
        """Unpack rows of ``LUT_TYPES`` as integers of 8 bits, without rounding: their table's entries are integers."""
        lut = self.unpack()
        assert isinstance(lut, Lut)
        return lut.integers()

    def unpack(self) -> Dense | Int4 | Int8 | Lut:
        """Unpack all rows; scales and minimums become fp32 if one of them is too large for fp16."""
        rows, columns = self.shape
        form = self.form
        if isinstance(form, Dense):
            values = torch.empty(rows, columns, dtype=torch.float32)
            _C.dequantize_rows(self.file, self.offsets.numpy(), self.types.numpy(), columns, values.numpy())
            return Dense(values)
        q = form.q.new_empty(rows, columns)
        for dtype in (form.scales.dtype, torch.float32):
            scales = form.scales.new_empty(rows, columns // GROUP, dtype=dtype)
            mins = None if form.mins is None else torch.empty_like(scales)
            if self._write(q, scales, mins, packed=False):
                break
        fields: dict[str, Any] = {"table": form.table} if isinstance(form, Lut) else {}
        return type(form)(q, scales, mins, **fields)

    def pack(self, q: Tensor, scales: Tensor, mins: Tensor | None) -> bool:
        """Pack all rows for the kernels of the CPU: what their operators make of the unpacked rows.

        Args:
            q: receives the packed integers, as from :func:`fastinfer.ops.int4_pack`, ``int5_pack`` with
                :attr:`has_five_bits`, or ``int8_pack``.
            scales, mins: receive the packed scales and minimums, as from :func:`fastinfer.ops.pack_scales`; fp16 or
                fp32. ``mins`` is ``None`` for a form without minimums.

        Returns:
            Whether all scales and minimums fit into their dtype; if not, the results are of no use.

        Raises:
            ValueError: the form is dense, or a size does not fit.
        """
        return self._write(q, scales, mins, packed=True)

    def pack_two_level(self, q: Tensor, scales: Tensor, mins: Tensor | None) -> None:
        """Pack all rows for the kernels of the CPU as they are stored, without rounding.

        Args:
            q: receives the packed integers, as from :func:`fastinfer.ops.int4_pack`, ``int5_pack`` or ``int6_pack``.
            scales, mins: receive the packed scales and minimums, as from :func:`fastinfer.ops.pack_two_level_scales`.
                ``mins`` is ``None`` for 6 bits.

        Raises:
            ValueError: ``two_level_bits`` is 0, or a size does not fit.
        """
        _C.pack_two_level_rows(
            self.file,
            self.offsets.numpy(),
            self.types.numpy(),
            self.shape[1],
            q.numpy(),
            scales.numpy(),
            None if mins is None else mins.numpy(),
        )

    def _write(self, q: Tensor, scales: Tensor, mins: Tensor | None, packed: bool) -> bool:
        return _C.unpack_rows(
            self.file,
            self.offsets.numpy(),
            self.types.numpy(),
            self.shape[1],
            packed,
            q.numpy(),
            scales.numpy(),
            None if mins is None else mins.numpy(),
        )

    def _shared(self) -> dict[str, object]:
        return {"file": self.file, "form": self.form}


def _form(type: GGUFType, columns: int, exact: bool) -> Dense | Int4 | Int8 | Lut:
    if exact and type in GROUPS_OF_16:
        return Dense(torch.empty(0, columns, dtype=torch.float32))
    dtype = torch.float32 if exact and type in GROUPS_OF_32 else torch.float16
    scales = torch.empty(0, columns // GROUP, dtype=dtype)
    mins = scales if type in TYPES_WITH_MINS else None
    if type in INT8_TYPES:
        return Int8(torch.empty(0, columns, dtype=torch.int8), scales, mins)
    q = torch.empty(0, columns, dtype=torch.uint8)
    return Int4(q, scales, mins) if type in INT4_TYPES else Lut(q, scales, table=TABLES[type])
