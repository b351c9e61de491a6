"""Packing of unpacked weights into the forms that the kernels read."""

from collections.abc import Iterable

import torch
from torch import Tensor

from fastinfer import ops
from fastinfer.formats.gguf_rows import GGUFRows
from fastinfer.formats.unpacked import Dense, Grouped, Int4, Int8, Lut, Unpacked
from fastinfer.ops.pack import TILE_ROWS, TWO_LEVEL_INPUTS
from fastinfer.utils.huge_pages import HugePages
from fastinfer.weights.weight import DenseWeight, LutWeight, QuantizedWeight, W8A8Weight, Weight


def make_weight(
    unpacked: Unpacked | Iterable[Unpacked],
    activation_bits: int,
    device: str = "cpu",
    dense_dtype: torch.dtype | None = None,
    bias: Tensor | None = None,
    memory: HugePages | None = None,
    out_features: int | None = None,
) -> Weight:
    """Pack a weight for the kernels; no integer or scale is rounded.

    Args:
        unpacked: the weight, in host memory or in a mapped file, from which a CPU's weights are packed directly; the
            result shares no memory with the file. Or its rows in consecutive parts, which are packed one at a time so
            that only one of them is in memory; each part but the last has a multiple of 16 rows.
        activation_bits: precision of the input in products, see :class:`fastinfer.weights.weight.QuantizedWeight`. It
            is 32 with a look-up table whose entries are not int8 (bitsandbytes' NF4 and FP4).
        device: device that will use the weight; the packed forms of CPU and GPU differ.
        dense_dtype: dtype to convert a weight to that is not quantised; ``None`` to keep the checkpoint's dtype.
        bias: [out_features] fp32, or ``None``.
        memory: allocator for packed tensors (CPU only); ``None`` for torch's own.
        out_features: number of rows of all parts; only with parts.

    Raises:
        ValueError: the parts have different forms, one of them but the last does not have a multiple of 16 rows, or
            together they do not have ``out_features`` rows.
    """
    bias = None if bias is None else bias.to(device)
    if isinstance(unpacked, Unpacked):
        out_features = unpacked.shape[0]
    assert out_features is not None
    num_rows = 0
    values: list[Tensor] = []
    tiles = PackedTiles(-(-out_features // TILE_ROWS), device, memory)
    forms = set()
    for part in (unpacked,) if isinstance(unpacked, Unpacked) else unpacked:
        form = part.form if isinstance(part, GGUFRows) else part
        bits = packed_bits(part, device)
        forms.add((type(form), bits, getattr(form, "mins", None) is None))
        if len(forms) > 1 or num_rows % TILE_ROWS or num_rows + part.shape[0] > out_features:
            raise ValueError(
                f"parts must have one form, fill {out_features} rows and, except for the last part, have a multiple of "
                f"{TILE_ROWS} rows, got {part.kind} of {part.shape[0]} rows after {num_rows}"
            )
        if bits:
            tiles.append(part)
        else:
            dense = part.unpack() if isinstance(part, GGUFRows) else part
            assert isinstance(dense, Dense)
            values.append(dense.values.to(device, dense_dtype))
        num_rows += part.shape[0]
    if num_rows != out_features:
        raise ValueError(f"parts must fill {out_features} rows, got {num_rows}")
    if values:
        return DenseWeight(_join(values, out_features, memory), bias)
    if isinstance(form, Lut):
        assert form.table is not None
        table = form.table.to(device, copy=True)
        lut_bits = 32 if form.int8_table is None else activation_bits
        return LutWeight(tiles.qweight, tiles.scales, table, out_features, lut_bits, bias)
    if isinstance(form, Int8) and form.int8_activations:
        return W8A8Weight(tiles.qweight, tiles.scales, out_features, bias)
    return QuantizedWeight(
        bits=bits,
        qweight=tiles.qweight,
        scales=tiles.scales,
        mins=tiles.mins,
        out_features=out_features,
        activation_bits=activation_bits,
        bias=bias,
        permutation=form.permutation.to(device) if isinstance(form, Grouped) and form.permutation is not None else None,
    )


def packed_bits(part: Unpacked, device: str) -> int:
    """Return the bits of a weight's integers once they are packed for a device: 4, 5, 6 or 8; 0 if it is dense."""
    if isinstance(part, GGUFRows):
        if device == "cpu" and (part.two_level_bits or part.has_five_bits):
            return part.two_level_bits or 5
        part = part.form
    return 0 if isinstance(part, Dense) else 8 if isinstance(part, Int8) else 4


def _join(parts: list[Tensor], out_features: int, memory: HugePages | None) -> Tensor:
    """Concatenate dense parts in memory that is no file's; in that of the allocator, if there is one."""
    if memory is not None:
        return torch.cat(parts, out=memory.empty((out_features, *parts[0].shape[1:]), parts[0].dtype))
    if len(parts) > 1:
        return torch.cat(parts)
    # Values that are mapped from a file are copied: if it was cut later, reading them would end the process. Only
    # memory that torch has allocated can be resized.
    values = parts[0]
    return values if values.is_cuda or values.untyped_storage().resizable() else values.clone()


class PackedTiles:
    """Packed tensors of a quantised weight that are filled part by part, without a second copy in memory.

    Args:
        num_tiles: number of tiles of the whole weight.
        device: device of the packed tensors.
        memory: allocator of the packed tensors; ``None`` for torch's own.

    Attributes:
        qweight, scales: [num_tiles, ...]; allocated by the first :meth:`append`. Scales become fp32 with the first part
            whose scales do not fit into fp16.
        mins: the same, or ``None`` if the weight has no minimums.
    """

    qweight: Tensor
    scales: Tensor
    mins: Tensor | None

    def __init__(self, num_tiles: int, device: str, memory: HugePages | None = None) -> None:
        self._num_tiles = num_tiles
        self._device = device
        self._memory = memory
        self._filled = 0

    def append(self, part: Unpacked) -> None:
        """Pack a quantised part into the next free tiles."""
        if isinstance(part, GGUFRows) and self._device != "cpu":
            part = part.unpack()
        if not self._filled:
            self._allocate(part)
        if isinstance(part, GGUFRows):
            if part.two_level_bits:
                part.pack_two_level(*self._next(part.shape[0]))
            elif not part.pack(*self._next(part.shape[0])):  # a scale is too large for fp16
                self._widen_scales()
                part.pack(*self._next(part.shape[0]))
        else:
            assert isinstance(part, Int4 | Int8 | Lut)
            if part.scales.dtype is torch.float32:
                self._widen_scales()
            qweight, scales, mins = self._next(part.shape[0])
            pack = ops.int8_pack if isinstance(part, Int8) else ops.int4_pack
            pack(part.q.to(self._device), out=qweight)
            ops.pack_scales(part.scales.to(self._device, scales.dtype), out=scales)
            if mins is not None:
                assert part.mins is not None
                ops.pack_scales(part.mins.to(self._device, mins.dtype), out=mins)
        self._filled -= -part.shape[0] // TILE_ROWS

    def _widen_scales(self) -> None:
        """Convert all scales and minimums to fp32, which rounds none."""
        self.scales = self.scales.float()
        self.mins = None if self.mins is None else self.mins.float()

    def _allocate(self, part: Unpacked) -> None:
        bits, blocks = packed_bits(part, self._device), part.shape[1] // 32
        form = part.form if isinstance(part, GGUFRows) else part
        scales: tuple[int, ...]
        if isinstance(part, GGUFRows) and part.two_level_bits:
            scales = (
                part.shape[1] // TWO_LEVEL_INPUTS,
                2 + TWO_LEVEL_INPUTS // (16 if bits == 6 else 32),
                TILE_ROWS,
            )
            dtype, has_mins = torch.int8, bits != 6
        else:
            assert isinstance(form, Int4 | Int8 | Lut)
            scales = form.scales.shape[1], TILE_ROWS
            dtype, has_mins = form.scales.dtype, form.mins is not None
        self.qweight = self._empty((blocks, bits, TILE_ROWS, 4), torch.int8 if bits == 8 else torch.uint8)
        self.scales = self._empty(scales, dtype)
        self.mins = self._empty(scales, dtype) if has_mins else None

    def _empty(self, tile_shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        shape = self._num_tiles, *tile_shape
        if self._memory is not None:
            return self._memory.empty(shape, dtype)
        return torch.empty(shape, dtype=dtype, device=self._device)

    def _next(self, rows: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the next free tiles, for this many rows."""
        tiles = slice(self._filled, self._filled - -rows // TILE_ROWS)
        return self.qweight[tiles], self.scales[tiles], None if self.mins is None else self.mins[tiles]
