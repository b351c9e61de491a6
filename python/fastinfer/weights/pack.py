"""Packing of unpacked weights into the forms that the kernels read."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from fastinfer import ops
from fastinfer.formats.unpacked import Dense, Int4, Int8, Lut, Unpacked
from fastinfer.ops.pack import TILE_ROWS
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
        unpacked: the weight, in host memory. Or its rows in consecutive parts, which are packed one at a time so that
            only one of them is in memory; each part but the last has a multiple of 16 rows.
        activation_bits: precision of the input in products, see :class:`fastinfer.weights.weight.QuantizedWeight`.
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
    tiles, num_rows = -(-out_features // TILE_ROWS), 0
    values: list[Tensor] = []
    qweight, scales, mins = (_TileBuffer(tiles, memory) for _ in range(3))
    forms = set()
    for part in (unpacked,) if isinstance(unpacked, Unpacked) else unpacked:
        forms.add((type(part), getattr(part, "mins", None) is None))
        if len(forms) > 1 or num_rows % TILE_ROWS or num_rows + part.shape[0] > out_features:
            raise ValueError(
                f"parts must have one form, fill {out_features} rows and, except for the last part, have a multiple of "
                f"{TILE_ROWS} rows, got {type(part).__name__} of {part.shape[0]} rows after {num_rows}"
            )
        num_rows += part.shape[0]
        if isinstance(part, Dense):
            values.append(part.values.to(device, dense_dtype))
            continue
        assert isinstance(part, Int4 | Int8 | Lut)
        if isinstance(part, Int8):
            qweight.append(ops.int8_pack, part.q.to(device), (part.shape[1] // 32, 8, TILE_ROWS, 4))
        else:
            qweight.append(ops.int4_pack, part.q.to(device), (part.shape[1] // 32, 4, TILE_ROWS, 4))
        scales.append(ops.pack_scales, part.scales.to(device), (part.scales.shape[1], TILE_ROWS))
        if part.mins is not None:
            mins.append(ops.pack_scales, part.mins.to(device), (part.mins.shape[1], TILE_ROWS))
    if num_rows != out_features:
        raise ValueError(f"parts must fill {out_features} rows, got {num_rows}")
    if values:
        return DenseWeight(values[0] if len(values) == 1 else torch.cat(values), bias)
    assert isinstance(part, Int4 | Int8 | Lut)
    if isinstance(part, Lut):
        assert part.table is not None
        return LutWeight(qweight.packed, scales.packed, part.table.to(device), out_features, bias)
    if isinstance(part, Int8) and part.int8_activations:
        return W8A8Weight(qweight.packed, scales.packed, out_features, bias)
    return QuantizedWeight(
        bits=8 if isinstance(part, Int8) else 4,
        qweight=qweight.packed,
        scales=scales.packed,
        mins=None if part.mins is None else mins.packed,
        out_features=out_features,
        activation_bits=activation_bits,
        bias=bias,
        permutation=None if part.permutation is None else part.permutation.to(device),
    )


class _TileBuffer:
    """Packed tensor that is filled tile by tile, without a second copy in memory.

    Args:
        num_tiles: number of tiles of the whole weight.
        memory: allocator of the packed tensor; ``None`` for torch's own.

    Attributes:
        packed: [num_tiles, ...]; allocated by the first :meth:`append`.
    """

    def __init__(self, num_tiles: int, memory: HugePages | None) -> None:
        self._num_tiles = num_tiles
        self._memory = memory
        self._filled = 0

    def append(self, pack: Callable[..., Tensor], rows: Tensor, tile_shape: tuple[int, ...]) -> None:
        """Pack rows into the next free tiles.

        Args:
            pack: operator that packs rows and writes into ``out``.
            rows: [rows, ...], on the device of the packed tensor.
            tile_shape: shape of one packed tile.
        """
        if not self._filled:
            shape = self._num_tiles, *tile_shape
            self.packed = rows.new_empty(shape) if self._memory is None else self._memory.empty(shape, rows.dtype)
        begin, self._filled = self._filled, self._filled - (-len(rows) // TILE_ROWS)
        pack(rows, out=self.packed[begin : self._filled])
