"""Quantised rows of a GGUF file, which are unpacked or packed for the kernels straight from the file's blocks.

**Blocks of 32: Q4_0, Q4_1, IQ4_NL, Q5_0, Q5_1 and Q8_0.** A block has an fp16 scale, then (types ``_1``) an fp16
minimum, then (5 bits) the 32 fifth bits, then the integers. Nothing is rounded.

**Blocks of 256 in groups of 32: Q4_K and Q5_K.** A group has the scale ``d * scale`` and the minimum
``-dmin * minimum``; ``d`` and ``dmin`` are fp16 numbers of the block, ``scale`` and ``minimum`` have six bits. The
products have up to 17 bits, so they are exact in fp32 and rounded by at most 2^-11 of themselves in fp16. (Small ones
are not rounded at all: they are multiples of 2^-24, like the subnormal numbers of fp16.)

**Packed for a CPU, Q4_K and Q6_K keep their integers, scales and minimums as they are stored**: 4-bit and 6-bit weights
with two-level scales (:func:`fastinfer.ops.pack_two_level_scales`). Nothing is rounded, and they take 4.625 and 6.5625
bits a weight; in the file 4.5 and 6.5625.

**Blocks of 256 in groups of 16: Q3_K (scale only), Q2_K (scale and minimum) and, for a GPU, Q6_K (scale only).** The
other forms' smallest group is 32, so an exact weight is dense fp32. Otherwise two groups are joined into one group of
8-bit integers:

- Q6_K and Q3_K: the joined scale is the larger of the two divided by 4 or 32. The integers of that group stay exact,
  and those of the other group are rounded to 1/4 or 1/32 of the larger step. (If the signs of the scales differ, the
  range is 127 instead of 128, because -32 * -4 would be 128.)
- Q2_K: values are rounded to 1/127 of the largest value of the pair.

The joined scale is first rounded up to fp16. The added RMS error for random weights, relative to the error of the
format itself, is 0.24 for Q6_K, 0.03 for Q3_K and 0.02 for Q2_K. Errors add in square, so the total grows by 3 % for
Q6_K and by at most 0.1 % for the others.

Block layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. The readers are in csrc/formats.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastinfer import _C
from fastinfer.formats.gguf_types import GGUFType
from fastinfer.formats.unpacked import Dense, Int4, Int8, Lut, Unpacked

GROUP = 32
INT4_TYPES = (GGUFType.Q4_0, GGUFType.Q4_1, GGUFType.Q4_K)
TYPES_WITH_MINS = (GGUFType.Q4_1, GGUFType.Q5_1, GGUFType.Q4_K, GGUFType.Q5_K)
GROUPS_OF_32 = (GGUFType.Q4_K, GGUFType.Q5_K)
GROUPS_OF_16 = (GGUFType.Q6_K, GGUFType.Q3_K, GGUFType.Q2_K)
INT8_TYPES = (GGUFType.Q8_0, GGUFType.Q5_0, GGUFType.Q5_1, GGUFType.Q5_K, *GROUPS_OF_16)
TWO_LEVEL_BITS = {int(GGUFType.Q4_K): 4, int(GGUFType.Q6_K): 6}
QUANTIZED_TYPES = (*INT4_TYPES, *INT8_TYPES, GGUFType.IQ4_NL)

# Look-up table of IQ4_NL, for normally distributed weights.
IQ4_NL_TABLE = torch.tensor(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.float32
)


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
    def shape(self) -> tuple[int, int]:
        return len(self.offsets), self.form.shape[1]

    @property
    def kind(self) -> str:
        return "Int6" if self.two_level_bits == 6 else self.form.kind

    @property
    def two_level_bits(self) -> int:
        """Bits of the integers, 4 or 6, if all rows can be packed by :meth:`pack_two_level`; else 0."""
        types = self.types.unique()
        return TWO_LEVEL_BITS.get(int(types[0]), 0) if len(types) == 1 else 0

    def dequantize(self) -> Tensor:
        return self.unpack().dequantize()

    def fits(self, other: Unpacked) -> bool:
        return isinstance(other, GGUFRows) and self.file is other.file and self.form.fits(other.form)

    def unpack_integers(self) -> Int8:
        """Unpack rows of IQ4_NL as integers of 8 bits, without rounding: the entries of its table are integers."""
        lut = self.unpack()
        assert isinstance(lut, Lut)
        return Int8(IQ4_NL_TABLE.to(torch.int8)[lut.q.long()], lut.scales)

    def unpack(self) -> Dense | Int4 | Int8 | Lut:
        """Unpack all rows; scales and minimums become fp32 if one of them is too large for fp16."""
        rows, columns = self.shape
        form = self.form
        if isinstance(form, Dense):
            values = torch.empty(rows, columns)
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
            q: receives the packed integers, as from :func:`fastinfer.ops.int4_pack` or ``int8_pack``.
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
            q: receives the packed integers, as from :func:`fastinfer.ops.int4_pack` or ``int6_pack``.
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
        return Dense(torch.empty(0, columns))
    dtype = torch.float32 if exact and type in GROUPS_OF_32 else torch.float16
    scales = torch.empty(0, columns // GROUP, dtype=dtype)
    mins = scales if type in TYPES_WITH_MINS else None
    if type in INT8_TYPES:
        return Int8(torch.empty(0, columns, dtype=torch.int8), scales, mins)
    q = torch.empty(0, columns, dtype=torch.uint8)
    return Int4(q, scales, mins) if type in INT4_TYPES else Lut(q, scales, table=IQ4_NL_TABLE)
