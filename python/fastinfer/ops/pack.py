"""Packing of quantised weights for the kernels, and dequantisation of packed weights.

CPU layout: rows are in tiles of 16 and inputs in blocks of 32, so one vector register holds 4 consecutive inputs of
each of 8 or 16 rows.

- 8 bits: ``[tiles, in_features / 32, 8, 16, 4]`` int8, with the dimensions tile, block, run of four inputs, row, input.
- 4 bits: ``[tiles, in_features / 32, 4, 16, 4]`` uint8; the low nibbles of step s hold inputs 8s .. 8s+3 of the block,
  the high nibbles 8s+4 .. 8s+7.
- 5 bits: ``[tiles, in_features / 32, 5, 16, 4]`` uint8; steps 0 to 3 hold the low four bits, in the order of 4 bits.
  Bit s of the bytes of step 4 is the high bit of inputs 4s .. 4s+3.
- 6 bits: ``[tiles, in_features / 32, 6, 16, 4]`` uint8 of q + 32; steps 0 to 3 hold the low four bits, in the order of
  4 bits. Step 4 + r holds the high two bits of inputs 16r .. 16r+15: bits 2s and 2s+1 are those of inputs 16r+4s ..
  16r+4s+3.

Rows past ``out_features`` are zero. The GPU layout has the same shapes, but within a block of 16 rows by 32 inputs the
bytes have the order in which the lanes of a warp read them (csrc/quant/pack.h). Pack a weight on the device that will
use it.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from fastinfer.ops._library import check_tensors, into, ops

TILE_ROWS = 16
TWO_LEVEL_INPUTS = 256  # of a row, that share a factor of two-level scales


def int4_pack(q: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Pack a 4-bit weight for the kernels of its device.

    Args:
        q: [out_features, in_features] uint8, 0..15; contiguous; ``in_features`` a multiple of 32.
        out: receives the result; see :mod:`fastinfer.ops`.

    Returns:
        [ceil(out_features / 16), in_features / 32, 4, 16, 4] uint8, on the device of ``q``.

    Raises:
        RuntimeError: a shape, dtype or stride does not fit; on the CPU also if a value is above 15 (a GPU uses its
            lower four bits).

    Devices: CPU, CUDA.

    Source: the project's own layout, csrc/quant/pack.h.

    >>> import torch, fastinfer.ops as ops
    >>> q = torch.arange(17 * 32).view(17, 32).remainder(16).to(torch.uint8)
    >>> packed = ops.int4_pack(q)
    >>> packed.shape  # 17 rows take two tiles
    torch.Size([2, 1, 4, 16, 4])
    >>> one, zero = ops.pack_scales(torch.ones(17, 1)), ops.pack_scales(torch.zeros(17, 1))
    >>> torch.equal(ops.int4_dequantize(packed, one, zero, out_features=17), q.float())
    True
    """
    if out is not None:
        return into(out, ops.int4_pack, q)
    return ops.int4_pack.default(q)


def int5_pack(q: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Pack a 5-bit weight for the kernels of the CPU.

    Args:
        q: [out_features, in_features] uint8, 0..31; contiguous; ``in_features`` a multiple of 32.
        out: receives the result; see :mod:`fastinfer.ops`.

    Returns:
        [ceil(out_features / 16), in_features / 32, 5, 16, 4] uint8.

    Raises:
        RuntimeError: a shape, dtype or stride does not fit, or a value is above 31.

    Devices: CPU.

    Source: the project's own layout, csrc/quant/pack.h.

    >>> import torch, fastinfer.ops as ops
    >>> ops.int5_pack(torch.zeros(17, 64, dtype=torch.uint8)).shape
    torch.Size([2, 2, 5, 16, 4])
    """
    if out is not None:
        return into(out, ops.int5_pack, q)
    return ops.int5_pack.default(q)


def int6_pack(q: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Pack a 6-bit weight for the kernels of the CPU.

    Args:
        q: [out_features, in_features] int8, -32..31; contiguous; ``in_features`` a multiple of 32.
        out: receives the result; see :mod:`fastinfer.ops`.

    Returns:
        [ceil(out_features / 16), in_features / 32, 6, 16, 4] uint8.

    Raises:
        RuntimeError: a shape, dtype or stride does not fit, or a value is outside of -32..31.

    Devices: CPU.

    Source: the project's own layout, csrc/quant/pack.h.

    >>> import torch, fastinfer.ops as ops
    >>> ops.int6_pack(torch.zeros(17, 256, dtype=torch.int8)).shape
    torch.Size([2, 8, 6, 16, 4])
    """
    if out is not None:
        return into(out, ops.int6_pack, q)
    return ops.int6_pack.default(q)


def int8_pack(q: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Pack an 8-bit weight for the kernels of its device.

    Args:
        q: [out_features, in_features] int8; contiguous; ``in_features`` a multiple of 32.
        out: receives the result; see :mod:`fastinfer.ops`.

    Returns:
        [ceil(out_features / 16), in_features / 32, 8, 16, 4] int8, on the device of ``q``.

    Raises:
        RuntimeError: a shape, dtype or stride does not fit.

    Devices: CPU, CUDA.

    Source: the project's own layout, csrc/quant/pack.h.

    >>> import torch, fastinfer.ops as ops
    >>> ops.int8_pack(torch.zeros(17, 64, dtype=torch.int8)).shape
    torch.Size([2, 2, 8, 16, 4])
    """
    if out is not None:
        return into(out, ops.int8_pack, q)
    return ops.int8_pack.default(q)


def pack_scales(scales: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Reorder scales or minimums for a packed weight, in plain torch.

    Args:
        scales: [out_features, groups], any dtype (the products take fp16 and fp32).
        out: receives the result; may be strided.

    Returns:
        [ceil(out_features / 16), groups, 16], dtype of ``scales``; zeros past ``out_features``.

    Raises:
        ValueError: ``scales`` does not have two dimensions, or ``out`` does not have the shape, dtype and device of the
            result.

    Devices: any.

    >>> import torch, fastinfer.ops as ops
    >>> ops.pack_scales(torch.tensor([[1.0, 10.0], [2.0, 20.0]]))[0, :, :3]  # groups, then rows
    tensor([[ 1.,  2.,  0.],
            [10., 20.,  0.]])
    """
    check_tensors("pack_scales", scales=scales)
    if scales.dim() != 2:
        raise ValueError(f"scales must be [out_features, groups], got the shape {tuple(scales.shape)}")
    rows, groups = scales.shape
    tiles = -(-rows // TILE_ROWS)
    if rows % TILE_ROWS:
        scales = F.pad(scales, (0, 0, 0, tiles * TILE_ROWS - rows))
    packed = scales.view(tiles, TILE_ROWS, groups).transpose(1, 2)
    if out is None:
        # A copy even of a single group, which is in order already, so that the result has its own memory.
        return packed.clone(memory_format=torch.contiguous_format)
    check_tensors("pack_scales", out=out)
    if (out.shape, out.dtype, out.device) != (packed.shape, packed.dtype, packed.device):
        raise ValueError(
            f"out must be {tuple(packed.shape)} {packed.dtype} on {packed.device}, "
            f"got {tuple(out.shape)} {out.dtype} on {out.device}"
        )
    return out.copy_(packed.detach())


def pack_two_level_scales(integers: Tensor, factors: Tensor) -> Tensor:
    """Pack scales or minimums that are ``integer * factor``, in plain torch.

    Args:
        integers: [out_features, groups] int8.
        factors: [out_features, in_features / 256] fp16, each for the groups of 256 inputs.

    Returns:
        [ceil(out_features / 16), in_features / 256, 2 + g, 16] int8, where g is the number of groups in 256 inputs: for
        each row of a tile the two bytes of its factor, then g times an integer of each row; zeros past
        ``out_features``.

    Raises:
        ValueError: a shape or dtype does not fit.

    Devices: any.

    >>> import torch, fastinfer.ops as ops
    >>> integers, factors = torch.arange(8, dtype=torch.int8).view(1, 8), torch.tensor([[0.5]]).half()
    >>> ops.pack_two_level_scales(integers, factors)[0, 0, 2:, 0]
    tensor([0, 1, 2, 3, 4, 5, 6, 7], dtype=torch.int8)
    """
    check_tensors("pack_two_level_scales", integers=integers, factors=factors)
    if integers.dim() != 2 or integers.dtype != torch.int8:
        raise ValueError(f"integers must be [out_features, groups] int8, got {tuple(integers.shape)} {integers.dtype}")
    rows, groups = integers.shape
    fits = factors.dim() == 2 and factors.shape[0] == rows and factors.shape[1] and groups % factors.shape[1] == 0
    if not fits or factors.dtype != torch.float16:
        raise ValueError(
            f"factors must be [{rows}, in_features / 256] float16 and divide the {groups} groups, "
            f"got {tuple(factors.shape)} {factors.dtype}"
        )
    blocks = factors.shape[1]
    both = [pack_scales(factors).view(torch.int8).unflatten(2, (2, TILE_ROWS)), pack_scales(integers)]
    return torch.cat([both[0], both[1].unflatten(1, (blocks, groups // blocks))], dim=2)


def interleave_gate_up(gate: Tensor, up: Tensor) -> Tensor:
    """Interleave the rows of gate and up as a gated activation expects: 16 of the gate, 16 of up, and so on.

    Args:
        gate, up: [rows, ...] of the same shape, any dtype; rows a multiple of 16. Weights, biases, or row indices.

    Returns:
        [2 * rows, ...].

    Raises:
        ValueError: the shapes differ, or the number of rows is not a multiple of 16.

    Devices: any.

    >>> import torch, fastinfer.ops as ops
    >>> ops.interleave_gate_up(torch.arange(32), torch.arange(100, 132))[14:34]
    tensor([ 14,  15, 100, 101, 102, 103, 104, 105, 106, 107, 108, 109, 110, 111,
            112, 113, 114, 115,  16,  17])
    >>> x, gate, up = torch.randn(3, 64), torch.randn(32, 64), torch.randn(32, 64)
    >>> out = ops.gemm(x, ops.interleave_gate_up(gate, up), activation="silu")
    >>> torch.allclose(out, torch.nn.functional.silu(x @ gate.T) * (x @ up.T), rtol=1e-3, atol=1e-3)
    True
    """
    check_tensors("interleave_gate_up", gate=gate, up=up)
    if gate.shape != up.shape:
        raise ValueError(f"gate and up must have one shape, got {tuple(gate.shape)} and {tuple(up.shape)}")
    if not gate.dim():
        raise ValueError("gate and up must have rows, got scalars")
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
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Dequantise rows of a packed 4-bit weight: ``scale * q + min`` in fp32, then rounded to ``dtype``.

    Args:
        qweight, scales, mins, out_features: as in :func:`fastinfer.ops.int4_gemm`.
        rows: [n] int64, row indices (the token ids of an embedding); ``None`` for all rows in order. On a GPU, which
            does not check indices, an index out of range gives a row of NaN.
        dtype: dtype of the result: fp32, bf16 or fp16.
        out: receives the result; see :mod:`fastinfer.ops`.

    Returns:
        [n or out_features, in_features].

    Raises:
        RuntimeError: a shape, dtype or device does not fit; on the CPU also an index out of range.

    Devices: CPU, CUDA.

    Source: inverse of :func:`int4_pack`.

    >>> import torch, fastinfer.ops as ops
    >>> q = torch.arange(2 * 32).view(2, 32).remainder(16).to(torch.uint8)
    >>> scales, mins = ops.pack_scales(torch.tensor([[1.0], [0.5]])), ops.pack_scales(torch.tensor([[0.0], [-4.0]]))
    >>> ops.int4_dequantize(ops.int4_pack(q), scales, mins, 2, rows=torch.tensor([1]))[:, :6]
    tensor([[-4.0000, -3.5000, -3.0000, -2.5000, -2.0000, -1.5000]])
    """
    if out is not None:
        return into(out, ops.int4_dequantize, qweight, scales, mins, out_features, rows, dtype)
    return ops.int4_dequantize.default(qweight, scales, mins, out_features, rows, dtype)


def int8_dequantize(
    qweight: Tensor,
    scales: Tensor,
    mins: Tensor | None,
    out_features: int,
    rows: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Dequantise rows of a packed 8-bit weight: ``scale * q + min`` in fp32, then rounded to ``dtype``.

    Args:
        qweight, scales, mins, out_features: as in :func:`fastinfer.ops.int8_gemm`.
        rows, dtype, out: as in :func:`int4_dequantize`.

    Returns:
        [n or out_features, in_features].

    Raises:
        RuntimeError: the same as :func:`int4_dequantize`.

    Devices: CPU, CUDA.

    Source: inverse of :func:`int8_pack`.

    >>> import torch, fastinfer.ops as ops
    >>> q, scales = torch.randint(-128, 128, (20, 64), dtype=torch.int8), torch.rand(20, 2)
    >>> out = ops.int8_dequantize(ops.int8_pack(q), ops.pack_scales(scales), None, out_features=20)
    >>> torch.equal(out, q * scales.repeat_interleave(32, dim=1))
    True
    """
    if out is not None:
        return into(out, ops.int8_dequantize, qweight, scales, mins, out_features, rows, dtype)
    return ops.int8_dequantize.default(qweight, scales, mins, out_features, rows, dtype)


def int5_dequantize(
    qweight: Tensor,
    scales: Tensor,
    mins: Tensor | None,
    out_features: int,
    rows: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Dequantise rows of a packed 5-bit weight: ``scale * q + min`` in fp32, then rounded to ``dtype``.

    Args:
        qweight, scales, mins, out_features: as in :func:`fastinfer.ops.int5_gemm`.
        rows, dtype, out: as in :func:`int4_dequantize`.

    Returns:
        [n or out_features, in_features].

    Raises:
        RuntimeError: the same as :func:`int4_dequantize`.

    Devices: CPU.

    Source: inverse of :func:`int5_pack`.

    >>> import torch, fastinfer.ops as ops
    >>> q, scales = torch.randint(0, 32, (20, 64), dtype=torch.uint8), torch.rand(20, 2)
    >>> out = ops.int5_dequantize(ops.int5_pack(q), ops.pack_scales(scales), None, out_features=20)
    >>> torch.equal(out, (q.float() - 16) * scales.repeat_interleave(32, dim=1))
    True
    """
    if out is not None:
        return into(out, ops.int5_dequantize, qweight, scales, mins, out_features, rows, dtype)
    return ops.int5_dequantize.default(qweight, scales, mins, out_features, rows, dtype)


def int6_dequantize(
    qweight: Tensor,
    scales: Tensor,
    out_features: int,
    rows: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Dequantise rows of a packed 6-bit weight: ``scale * q`` in fp32, then rounded to ``dtype``.

    Args:
        qweight, scales, out_features: as in :func:`fastinfer.ops.int6_gemm`.
        rows, dtype, out: as in :func:`int4_dequantize`.

    Returns:
        [n or out_features, in_features].

    Raises:
        RuntimeError: the same as :func:`int4_dequantize`.

    Devices: CPU.

    Source: inverse of :func:`int6_pack`.

    >>> import torch, fastinfer.ops as ops
    >>> q = torch.randint(-32, 32, (20, 256), dtype=torch.int8)
    >>> scales = ops.pack_two_level_scales(torch.ones(20, 16, dtype=torch.int8), torch.ones(20, 1).half())
    >>> torch.equal(ops.int6_dequantize(ops.int6_pack(q), scales, out_features=20), q.float())
    True
    """
    if out is not None:
        return into(out, ops.int6_dequantize, qweight, scales, out_features, rows, dtype)
    return ops.int6_dequantize.default(qweight, scales, out_features, rows, dtype)
