"""Conversion of integers with zero points, ``w = scale * (q - zero)``, to the forms of the kernels."""

import torch
from torch import Tensor

from fastinfer.formats.unpacked import Int4, Int8

# Zero point of the kernels' 4-bit form without minimums, and the offset between unsigned and signed bytes.
INT4_ZERO, INT8_ZERO = 8, 128


def with_zero_points(
    q: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, permutation: Tensor | None, exact: bool
) -> Int4 | Int8:
    """Shift the integers to the zero point of the kernels, or add minimums if that is impossible.

    Integers of 2 and 3 bits always fit into 4 bits with a zero point of 8. For 4 and 8 bits every zero point must be
    the middle, as in symmetric quantisation.

    Args:
        q: [rows, cols] uint8, 0 .. 2**bits - 1.
        scales: [rows, groups] fp16, bf16 or fp32.
        zeros: [rows, groups] uint8, the zero points; ``None`` if all are the middle (4 and 8 bits).
        bits: 2, 3, 4 or 8.
        permutation: order of the inputs, see :class:`fastinfer.formats.unpacked.Grouped`.
        exact: whether scales and minimums become fp16 only if none of them is rounded (rare for minimums, which are
            products). Otherwise they become fp16 if each is rounded by at most 2^-11 of itself.
    """
    kernel_zero = INT8_ZERO if bits == 8 else INT4_ZERO
    mins = None
    if zeros is not None and bits < 4:
        shifts = (kernel_zero - zeros)[..., None]  # 4..8: no overflow
        q = (q.unflatten(1, (zeros.shape[1], -1)) + shifts).flatten(1)
    elif zeros is not None and (zeros != kernel_zero).any():
        # The kernels' 4-bit form has a zero point of 8 without minimums, and none with minimums.
        offset = kernel_zero if bits == 8 else 0
        mins = (offset - zeros.float()) * scales.float()
    scales, mins = kernel_scales(scales, mins, exact)
    if bits == 8:
        return Int8((q ^ 0x80).view(torch.int8), scales, mins, permutation)
    return Int4(q, scales, mins, permutation)


def kernel_scales(scales: Tensor, mins: Tensor | None = None, exact: bool = True) -> tuple[Tensor, Tensor | None]:
    """Convert scales and minimums to fp16 if that is precise enough, else to fp32; see :func:`with_zero_points`."""
    tolerance = 0.0 if exact else 2**-11
    numbers = [scales] if mins is None else [scales, mins]
    rounded = [values.half() for values in numbers]
    if not all(_close(a.float(), b.float(), tolerance) for a, b in zip(rounded, numbers, strict=True)):
        rounded = [values.float() for values in numbers]
    return rounded[0], rounded[1] if mins is not None else None


def _close(rounded: Tensor, precise: Tensor, tolerance: float) -> bool:
    return bool(((rounded - precise).abs() <= tolerance * precise.abs()).all())
