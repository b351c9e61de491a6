"""The packed forms of quantised weights, and the way back.

CPU layout: rows in tiles of 16, inputs in blocks of 32, so that one vector register holds 4 consecutive inputs of each
of 8 or 16 rows. ``[tiles, in_features / 32, 8, 16, 4]`` int8 for 8 bits: block, run of four inputs, row, input. For 4
bits ``[tiles, in_features / 32, 4, 16, 4]`` uint8: the low nibbles hold inputs 8s .. 8s+3 of step s, the high ones
8s+4 .. 8s+7. Rows past ``out_features`` are zero.

A GPU's layout has the same shapes; within a block of 16 rows by 32 inputs the bytes lie as the lanes of a warp take
them (csrc/quant/pack.h). A weight must be packed on the device that will use it.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from fastinfer.ops._library import ops

TILE_ROWS = 16


def int4_pack(q: Tensor) -> Tensor:
    """Pack [out_features, in_features] uint8 values 0..15; ``in_features`` must be a multiple of 32.

    Returns:
        [ceil(out_features / 16), in_features / 32, 4, 16, 4] uint8.

    Values past 15 are an error; on a GPU, where they cannot be looked at, their lower four bits count.

    Devices: CPU, CUDA.
    """
    return ops.int4_pack.default(q)


def int8_pack(q: Tensor) -> Tensor:
    """Pack [out_features, in_features] int8 values; ``in_features`` must be a multiple of 32.

    Returns:
        [ceil(out_features / 16), in_features / 32, 8, 16, 4] int8.

    Devices: CPU, CUDA.
    """
    return ops.int8_pack.default(q)


def pack_scales(scales: Tensor) -> Tensor:
    """Bring scales or mins [out_features, groups] into the order of the packed weight: [tiles, groups, 16]."""
    if scales.dim() != 2:
        raise ValueError(f"scales must be [out_features, groups], got the shape {tuple(scales.shape)}")
    rows, groups = scales.shape
    tiles = -(-rows // TILE_ROWS)
    padded = F.pad(scales, (0, 0, 0, tiles * TILE_ROWS - rows))
    return padded.view(tiles, TILE_ROWS, groups).transpose(1, 2).contiguous()


def interleave_gate_up(gate: Tensor, up: Tensor) -> Tensor:
    """Interleave two [rows, ...] tensors in runs of 16 rows, as the gated activations expect; rows % 16 == 0."""
    if gate.shape != up.shape:
        raise ValueError(f"gate and up must have one shape, got {tuple(gate.shape)} and {tuple(up.shape)}")
    if gate.shape[0] % TILE_ROWS:
        raise ValueError(f"gate and up must have a multiple of {TILE_ROWS} rows, got {gate.shape[0]}")
    runs = [t.reshape(-1, TILE_ROWS, *t.shape[1:]) for t in (gate, up)]
    return torch.stack(runs, dim=1).reshape(2 * gate.shape[0], *gate.shape[1:])


def int4_dequantize(
    qweight: Tensor,
    scales: Tensor,
    mins: Tensor | None,
    out_features: int,
    rows: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Rows of a packed 4-bit weight as numbers: ``scale * q + min``, in fp32, then rounded to ``dtype``.

    Args:
        qweight, scales, mins, out_features: as in :func:`fastinfer.ops.int4_gemm`.
        rows: [n] int64 row indices (an embedding's token ids); ``None`` for all rows in order. An index past the
            weight is an error; on a GPU, where indices cannot be looked at, its row is NaN.
        dtype: fp32, bf16 or fp16.

    Returns:
        [n or out_features, in_features].

    Devices: CPU, CUDA.
    """
    return ops.int4_dequantize.default(qweight, scales, mins, out_features, rows, dtype)


def int8_dequantize(
    qweight: Tensor,
    scales: Tensor,
    mins: Tensor | None,
    out_features: int,
    rows: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """:func:`int4_dequantize` for a packed 8-bit weight."""
    return ops.int8_dequantize.default(qweight, scales, mins, out_features, rows, dtype)
