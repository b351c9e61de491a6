"""Unpacking of GGUF's K types (Q2_K to Q6_K): blocks of 256 values in groups, with an integer scale per group.

**Groups of 32: Q4_K and Q5_K.** A group has the scale ``d * scale`` and the minimum ``-dmin * minimum``; ``d`` and
``dmin`` are fp16 numbers of the block, ``scale`` and ``minimum`` have six bits. The products have up to 17 bits, so
they are exact in fp32 and rounded by at most 2^-11 of themselves in fp16. (Small ones are not rounded at all: they are
multiples of 2^-24, like the subnormal numbers of fp16.)

**Groups of 16: Q6_K, Q3_K (scale only) and Q2_K (scale and minimum).** The kernels' smallest group is 32, so an exact
weight is dense fp32. Otherwise two groups are joined into one group of 8-bit integers:

- Q6_K and Q3_K: the joined scale is the larger of the two divided by 4 or 32. The integers of that group stay exact,
  and those of the other group are rounded to 1/4 or 1/32 of the larger step. (If the signs of the scales differ, the
  range is 127 instead of 128, because -32 * -4 would be 128.)
- Q2_K: values are rounded to 1/127 of the largest value of the pair.

The joined scale is first rounded up to fp16. The added RMS error for random weights, relative to the error of the
format itself, is 0.24 for Q6_K, 0.03 for Q3_K and 0.02 for Q2_K. Errors add in square, so the total grows by 3 % for
Q6_K and by at most 0.1 % for the others.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import DTypeLike

from fastinfer.formats.gguf_bit_fields import bit_fields, by_row, halves, split_blocks
from fastinfer.formats.gguf_types import GGUFType
from fastinfer.formats.unpacked import Dense, Int4, Int8

Integers = Callable[[np.ndarray], np.ndarray]
Scales = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray | None]]

# Number of values processed at once, so that their fp32 copies stay in the CPU cache.
CHUNK = 2**17
FP16_MAX = 65504.0


def split_groups_of_32(data: np.ndarray, type: GGUFType, exact: bool) -> Int4 | Int8:
    """Unpack rows of Q4_K (Int4) or Q5_K (Int8, q is 0..31); scales and minimums are fp32, or fp16 if not exact."""
    blocks = split_blocks(data, type)
    low, high, shared = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = _float(blocks, 0) * np.concatenate([low & 63, shared & 15 | low >> 2 & 48], axis=-1)
    mins = -_float(blocks, 2) * np.concatenate([high & 63, shared >> 4 | high >> 2 & 48], axis=-1)
    if not exact:
        scales, mins = _fp16_unless_too_large(scales, mins)
    q = bit_fields(blocks, type.block_bytes - 128, type.block_bytes, bits=4, run=32)
    if type is GGUFType.Q4_K:
        return Int4(by_row(q), by_row(scales), by_row(mins))
    q |= bit_fields(blocks, 16, 48, bits=1, run=32, shift=4)
    return Int8(by_row(q.view(np.int8)), by_row(scales), by_row(mins))


def split_groups_of_16(data: np.ndarray, type: GGUFType, exact: bool) -> Dense | Int8:
    """Unpack rows of Q6_K, Q3_K or Q2_K to dense fp32, or if not exact to 8-bit integers in groups of 32."""
    split_integers, split_scales, largest = GROUPS_OF_16[type]
    blocks = split_blocks(data, type)
    scales, mins = split_scales(blocks)
    columns = blocks.shape[1] * type.block_size
    if exact:
        return Dense(torch.from_numpy(_affine(split_integers, blocks, scales, mins).reshape(-1, columns)))
    joined = _join_pairs(scales, mins, largest)
    divisors = np.repeat(joined.astype(np.float32), 2, axis=-1)
    with np.errstate(invalid="ignore"):  # infinities of a damaged block
        np.divide(scales, divisors, out=scales, where=divisors != 0)
        if mins is not None:
            np.divide(mins, divisors, out=mins, where=divisors != 0)
    q = _affine(split_integers, blocks, scales, mins, np.int8)
    return Int8(torch.from_numpy(q.reshape(-1, columns)), by_row(joined))


# Unpack the integers, [rows, blocks, 256] int8, of blocks [rows, blocks, block_bytes].


def _q6_k_integers(blocks: np.ndarray) -> np.ndarray:
    q = bit_fields(blocks, 0, 128, bits=4, run=64)
    q |= bit_fields(blocks, 128, 192, bits=2, run=32, shift=4)
    q -= 32  # wraps around in uint8, which is correct for the bytes as int8
    return q.view(np.int8)


def _q3_k_integers(blocks: np.ndarray) -> np.ndarray:
    q = bit_fields(blocks, 32, 96, bits=2, run=32)
    q |= bit_fields(blocks, 0, 32, bits=1, run=32, shift=2)
    q -= 4
    return q.view(np.int8)


def _q2_k_integers(blocks: np.ndarray) -> np.ndarray:
    return bit_fields(blocks, 16, 80, bits=2, run=32).view(np.int8)


# Compute the scales and minimums, [rows, blocks, 16] fp32, of the groups of 16.


def _q6_k_scales(blocks: np.ndarray) -> tuple[np.ndarray, None]:
    return _float(blocks, 208) * blocks[..., 192:208].view(np.int8), None


def _q3_k_scales(blocks: np.ndarray) -> tuple[np.ndarray, None]:
    four_bits = bit_fields(blocks, 96, 104, bits=4, run=8)
    two_bits = [blocks[..., 104:108] >> shift & 3 for shift in (0, 2, 4, 6)]
    six_bits = four_bits | np.concatenate(two_bits, axis=-1) << 4
    return _float(blocks, 108) * (six_bits.view(np.int8) - np.int8(32)), None


def _q2_k_scales(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return _float(blocks, 80) * (blocks[..., :16] & 15), -_float(blocks, 82) * (blocks[..., :16] >> 4)


GROUPS_OF_32 = (GGUFType.Q4_K, GGUFType.Q5_K)
# For each type: functions for integers and for scales and minimums, and the largest magnitude of an integer.
GROUPS_OF_16: dict[GGUFType, tuple[Integers, Scales, int]] = {
    GGUFType.Q6_K: (_q6_k_integers, _q6_k_scales, 32),
    GGUFType.Q3_K: (_q3_k_integers, _q3_k_scales, 4),
    GGUFType.Q2_K: (_q2_k_integers, _q2_k_scales, 3),
}


def _join_pairs(scales: np.ndarray, mins: np.ndarray | None, largest: int) -> np.ndarray:
    """Compute a common scale for each pair of groups of 16.

    Args:
        scales, mins: [rows, blocks, 16] fp32; ``mins`` may be ``None``.
        largest: largest magnitude of an integer.

    Returns:
        [rows, blocks, 8], scales with which the values of both groups fit into 8 bits; fp16, or fp32 if one of them is
        too large for fp16.
    """
    first, second = scales[..., 0::2], scales[..., 1::2]
    if mins is None:
        limits = np.where((first < 0) == (second < 0), np.float32(128), np.float32(127))
        joined = np.where(abs(first) >= abs(second), first, second) * (largest / limits)
    else:
        values = np.maximum(abs(mins), abs(scales * largest + mins)) / 127
        joined = np.maximum(values[..., 0::2], values[..., 1::2])
    (rounded,) = _fp16_unless_too_large(joined)
    if rounded is not joined:
        # Adding one unit in the last place rounds away from zero, for both signs.
        rounded.view(np.uint16)[...] += abs(rounded.astype(np.float32)) < abs(joined)
    return rounded


def _affine(
    split_integers: Integers,
    blocks: np.ndarray,
    scales: np.ndarray,
    mins: np.ndarray | None,
    dtype: DTypeLike = np.float32,
) -> np.ndarray:
    """Compute scale * q + min for every group of 16 in fp32, rounded if ``dtype`` is int8: [rows, blocks, 256]."""
    values = np.empty((*blocks.shape[:2], 256), dtype)
    step = max(1, CHUNK // (256 * blocks.shape[1]))
    for begin in range(0, len(blocks), step):
        rows = slice(begin, begin + step)
        part = split_integers(blocks[rows]).astype(np.float32)
        # Repeated scales are faster than broadcast ones, whose inner loops would have only 16 steps.
        part *= np.repeat(scales[rows], 16, axis=-1)
        if mins is not None:
            part += np.repeat(mins[rows], 16, axis=-1)
        with np.errstate(invalid="ignore"):  # infinities of a damaged block
            values[rows] = part if dtype is np.float32 else np.rint(part, out=part)
    return values


def _float(blocks: np.ndarray, offset: int) -> np.ndarray:
    """Read the fp16 number at a byte offset of every block, as fp32: [rows, blocks, 1]."""
    return halves(blocks, offset).astype(np.float32)[..., None]


def _fp16_unless_too_large(*numbers: np.ndarray) -> list[np.ndarray]:
    """Convert all numbers to fp16, or return them unchanged if one is too large (as no useful weight has)."""
    if all(abs(values).max() <= FP16_MAX for values in numbers):
        return [values.astype(np.float16) for values in numbers]
    return list(numbers)
