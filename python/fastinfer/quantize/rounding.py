"""Rounding to nearest, with scales and zero points per group of inputs.

The functions take weights as [rows, cols] fp32; ``group_size`` is the number of inputs that share a scale and must
divide ``cols``.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fastinfer.errors import QuantizationError
from fastinfer.formats.unpacked import Int4, Int8, Lut

FP16_MAX = torch.finfo(torch.float16).max
# The 16 values of NF4, quantiles of a normal distribution (https://arxiv.org/abs/2305.14314, appendix E).
NF4_TABLE = torch.tensor(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    dtype=torch.float32,
)


@dataclass(frozen=True, eq=False)
class Grid:
    """Grid of values that the weights of each group can take: ``scale * (q - zero)`` for q in ``0 .. levels - 1``.

    Attributes:
        scales: [rows, groups] fp32, rounded to fp16.
        zeros: [rows, groups] fp32, whole numbers.
        levels: 2 ** bits.
    """

    scales: Tensor
    zeros: Tensor
    levels: int

    @classmethod
    def of(cls, values: Tensor, bits: int, group_size: int, symmetric: bool, shrink: float | Tensor = 1.0) -> "Grid":
        """Create the grid between the smallest and largest value of each group, times ``shrink``.

        Args:
            values: [rows, cols] fp32.
            bits: number of bits, 2 to 8.
            group_size: number of inputs that share a scale; must divide cols.
            symmetric: whether the zero point is the middle level.
            shrink: fraction of the range to keep, a number or [rows, groups]; values beyond it are clipped.

        Raises:
            QuantizationError: a scale is beyond the range of fp16.
        """
        groups = values.unflatten(1, (-1, group_size))
        levels = 2**bits
        if symmetric:
            ranges = 2 * groups.abs().amax(-1) * shrink
            scales = ranges / (levels - 1)
        else:
            low, high = (groups.amin(-1) * shrink).clamp(max=0), (groups.amax(-1) * shrink).clamp(min=0)
            scales = (high - low) / (levels - 1)
        largest = float(scales.max())
        if not largest <= FP16_MAX:
            raise QuantizationError(f"expected weights whose scales fp16 holds, got a scale of {largest:.3g}")
        scales = scales.clamp(min=1e-5 / levels).half().float()  # for a group of zeros any scale will do
        zeros = torch.full_like(scales, levels // 2) if symmetric else (-low / scales).round().clamp(0, levels - 1)
        return cls(scales, zeros, levels)

    def quantize(self, values: Tensor) -> Tensor:
        """Return the nearest level of each value [rows, cols], as whole fp32 numbers."""
        groups: Tensor = values.unflatten(1, (self.scales.shape[1], -1))
        q = (groups / self.scales[..., None]).round_().add_(self.zeros[..., None]).clamp_(0, self.levels - 1)
        return q.flatten(1)

    def dequantize(self, q: Tensor) -> Tensor:
        """Return the values [rows, cols] fp32 of levels ``q``, the inverse of :meth:`quantize`."""
        groups: Tensor = q.unflatten(1, (self.scales.shape[1], -1))
        return ((groups - self.zeros[..., None]) * self.scales[..., None]).flatten(1)

    def unpacked(self, q: Tensor) -> Int4 | Int8:
        """Return the quantised weight in the form of :mod:`fastinfer.formats.unpacked`."""
        middle = self.levels // 2
        symmetric = bool((self.zeros == middle).all())
        if self.levels <= 16:
            if self.levels == 16 and symmetric:
                return Int4(q.byte(), self.scales.half())
            return Int4(q.byte(), self.scales, -self.zeros * self.scales)
        shifted = (q - middle).to(torch.int8)
        if symmetric:
            return Int8(shifted, self.scales.half())
        return Int8(shifted, self.scales, (middle - self.zeros) * self.scales)


def round_to_nearest(values: Tensor, bits: int, group_size: int, symmetric: bool = False) -> Int4 | Int8:
    """Round each weight to the nearest level of its group's grid; see :meth:`Grid.of` for the arguments."""
    grid = Grid.of(values, bits, group_size, symmetric)
    return grid.unpacked(grid.quantize(values))


def round_to_int8(values: Tensor, group_size: int) -> Int8:
    """Round each weight to a multiple -127 .. 127 of its group's fp16 scale."""
    groups = values.unflatten(1, (-1, group_size))
    scales = (groups.abs().amax(-1) / 127).half()
    steps = scales.float().clamp(min=torch.finfo(torch.float32).tiny)
    return Int8((groups / steps[..., None]).round_().clamp_(-127, 127).to(torch.int8).flatten(1), scales)


def round_with_minimum(values: Tensor, group_size: int) -> Int4:
    """Round each weight to the nearest of 16 levels between the smallest and the largest value of its group."""
    groups = values.unflatten(1, (-1, group_size))
    mins = groups.amin(-1).half()
    scales = ((groups.amax(-1) - mins.float()) / 15).clamp(min=0).half()
    steps = scales.float().clamp(min=torch.finfo(torch.float32).tiny)  # equal values have scale 0; any step will do
    q = ((groups - mins.float()[..., None]) / steps[..., None]).round_().clamp_(0, 15)
    return Int4(q.byte().flatten(1), scales, mins)


def round_to_nf4(values: Tensor, group_size: int = 64) -> Lut:
    """Round each weight to the nearest of NF4's 16 values times the largest magnitude of its group."""
    groups = values.unflatten(1, (-1, group_size))
    scales = groups.abs().amax(-1)
    relative = groups / scales.clamp(min=torch.finfo(torch.float32).tiny)[..., None]
    borders = (NF4_TABLE[1:] + NF4_TABLE[:-1]) / 2
    return Lut(torch.bucketize(relative, borders).byte().flatten(1), scales, table=NF4_TABLE)


def round_rows(values: Tensor) -> Int8:
    """Round each weight to int8 with one symmetric scale per row, for products with int8 inputs."""
    scales = (values.abs().amax(1, keepdim=True) / 127).clamp(min=1e-8)
    return Int8((values / scales).round().clamp(-127, 127).to(torch.int8), scales, int8_activations=True)
