"""Integers with zero points, ``w = scale * (q - zero)``, in the forms that the kernels have."""

import torch
from torch import Tensor

from fastinfer.formats.unpacked import Int4, Int8

# The zero that the kernels' 4-bit form without minimums has, and the one that makes of unsigned bytes signed ones.
INT4_ZERO, INT8_ZERO = 8, 128


def with_zero_points(
    q: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, permutation: Tensor | None, exact: bool
) -> Int4 | Int8:
    """Shift the integers so that their zero is the kernels' own, or give them minimums where that cannot be.

    2 and 3 bits always fit into 4 with a zero of 8. 4 and 8 bits do if every zero is the middle, as in symmetric
    quantisation.

    Args:
        q: [rows, cols] uint8, 0 .. 2**bits - 1.
        scales: [rows, groups] fp16, bf16 or fp32.
        zeros: [rows, groups] uint8; ``None`` for the middle everywhere (4 and 8 bits).
        bits: 2, 3, 4 or 8.
        permutation: see :class:`fastinfer.formats.unpacked.Grouped`.
        exact: scales and minimums are fp16 only where that rounds none of them (minimums are products, so they hardly
            ever are). Otherwise where it holds each of them to 2^-11 of itself.
    """
    kernel_zero = INT8_ZERO if bits == 8 else INT4_ZERO
    mins = None
    if zeros is not None and bits < 4:
        shifts = (kernel_zero - zeros)[..., None]  # 4..8: no overflow
        q = (q.unflatten(1, (zeros.shape[1], -1)) + shifts).flatten(1)
    elif zeros is not None and (zeros != kernel_zero).any():
        # Without minimums the kernels' 4-bit form has a zero, with minimums it has none.
        offset = kernel_zero if bits == 8 else 0
        mins = (offset - zeros.float()) * scales.float()
    scales, mins = kernel_scales(scales, mins, exact)
    if bits == 8:
        return Int8((q ^ 0x80).view(torch.int8), scales, mins, permutation)
    return Int4(q, scales, mins, permutation)


def kernel_scales(scales: Tensor, mins: Tensor | None = None, exact: bool = True) -> tuple[Tensor, Tensor | None]:
    """Scales and minimums in fp16 where that holds them, else in fp32; see :func:`with_zero_points`."""
    tolerance = 0.0 if exact else 2**-11
    numbers = [scales] if mins is None else [scales, mins]
    rounded = [values.half() for values in numbers]
    if not all(_close(a.float(), b.float(), tolerance) for a, b in zip(rounded, numbers, strict=True)):
        rounded = [values.float() for values in numbers]
    return rounded[0], rounded[1] if mins is not None else None


def _close(rounded: Tensor, precise: Tensor, tolerance: float) -> bool:
    return bool(((rounded - precise).abs() <= tolerance * precise.abs()).all())
