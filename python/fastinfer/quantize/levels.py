"""Integers with zero points, the form in which files store a quantised weight."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fastinfer.errors import QuantizationError
from fastinfer.formats.unpacked import Int4, Int8
from fastinfer.formats.zero_points import INT4_ZERO, INT8_ZERO

# Tolerance for a minimum that should be a whole multiple of its scale: above the rounding of fp32, far below a step.
WHOLE = 1e-3


@dataclass(frozen=True, eq=False)
class Levels:
    """Quantised weight ``w = scale * (q - zero)``.

    Attributes:
        q: [rows, cols] uint8, below ``2**bits``.
        scales: [rows, groups] fp16.
        zeros: [rows, groups] uint8, below ``2**bits``.
    """

    q: Tensor
    scales: Tensor
    zeros: Tensor

    @classmethod
    def of(cls, weight: Int4 | Int8, bits: int, symmetric: bool) -> "Levels":
        """Convert a weight without rounding; the inverse of :func:`fastinfer.formats.zero_points.with_zero_points`.

        Args:
            weight: weight whose minimums, if any, are whole multiples of its scales.
            bits: number of bits of the integers.
            symmetric: whether every zero point must be the middle level.

        Raises:
            QuantizationError: the weight cannot be represented exactly.
        """
        if weight.permutation is not None:
            raise QuantizationError("expected inputs in the model's order, got a permutation")
        scales = weight.scales.half()
        inexact = (scales.float() != weight.scales.float()) | scales.isinf()
        if bool(inexact.any()):
            raise QuantizationError(f"expected scales that fp16 holds, got {float(weight.scales[inexact][0])}")
        if isinstance(weight, Int8):
            q, offset, middle = weight.q.view(torch.uint8) ^ 0x80, INT8_ZERO, INT8_ZERO
        else:
            q, offset, middle = weight.q, 0, INT4_ZERO
        if weight.mins is None:
            zeros = torch.full(scales.shape, float(middle))
        else:
            quotients = offset - weight.mins.float() / weight.scales.float()
            zeros = quotients.round()
            is_whole = (quotients - zeros).abs() <= WHOLE
            if not bool(is_whole.all()):
                got = float((offset - quotients)[~is_whole][0])
                raise QuantizationError(f"expected minimums that are whole multiples of their scales, got {got} times")
        highest = max(int(q.max()), int(zeros.max()))
        if highest >= 2**bits or int(zeros.min()) < 0:
            raise QuantizationError(
                f"expected integers and zero points 0 .. {2**bits - 1}, got integers up to {int(q.max())} "
                f"and zero points {int(zeros.min())} .. {int(zeros.max())}"
            )
        if symmetric and bool((zeros != 2 ** (bits - 1)).any()):
            raise QuantizationError(
                f"expected {2 ** (bits - 1)} as every zero point of a symmetric weight, "
                f"got {int(zeros.min())} .. {int(zeros.max())}"
            )
        return cls(q, scales, zeros.byte())
