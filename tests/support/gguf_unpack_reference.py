"""Reference for the unpacking of GGUF blocks: whole arrays of numpy, operation by operation."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor

from fastinfer.formats.gguf_rows import IQ4_NL_TABLE
from fastinfer.formats.gguf_types import GGUFType
from fastinfer.formats.unpacked import Dense, Int4, Int8, Lut, Unpacked

Integers = Callable[[np.ndarray], np.ndarray]
Scales = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray | None]]

FP16_MAX = 65504.0


def unpack_reference(data: np.ndarray, type: GGUFType, exact: bool) -> Unpacked:
    """Unpack rows [rows, row_bytes] of a quantised type."""
    if type in (GGUFType.Q4_0, GGUFType.Q4_1):
        return split_int4(data, type)
    if type in (GGUFType.Q8_0, GGUFType.Q5_0, GGUFType.Q5_1):
        return split_int8(data, type)
    if type is GGUFType.IQ4_NL:
        return split_iq4_nl(data)
    split = split_groups_of_32 if type in (GGUFType.Q4_K, GGUFType.Q5_K) else split_groups_of_16
    return split(data, type, exact)


def split_blocks(data: np.ndarray, type: GGUFType) -> np.ndarray:
    """View rows [rows, row_bytes] as blocks [rows, blocks, block_bytes]."""
    return np.ascontiguousarray(data).reshape(data.shape[0], -1, type.block_bytes)


def halves(blocks: np.ndarray, offset: int) -> np.ndarray:
    """Read the fp16 number at a byte offset of every block: [rows, blocks]."""
    return np.ascontiguousarray(blocks[..., offset : offset + 2]).view(np.float16)[..., 0]


def bit_fields(blocks: np.ndarray, begin: int, end: int, bits: int, run: int, shift: int = 0) -> np.ndarray:
    """Unpack a range of bytes of every block into 8 / bits times as many values, [rows, blocks, values] uint8.

    Each run of ``run`` bytes gives ``run`` values from the lowest bits of its bytes, then as many from the next higher
    bits, and so on; they are shifted left.
    """
    runs = [
        (blocks[..., byte : byte + run] >> bit & 2**bits - 1) << shift
        for byte in range(begin, end, run)
        for bit in range(0, 8, bits)
    ]
    return np.concatenate(runs, axis=-1)


def by_row(values: np.ndarray) -> Tensor:
    """Flatten [rows, ...] to a tensor [rows, cols]."""
    return torch.from_numpy(values.reshape(values.shape[0], -1))


def split_int4(data: np.ndarray, type: GGUFType) -> Int4:
    """Unpack rows of Q4_0 or Q4_1."""
    blocks = split_blocks(data, type)
    mins = _half(blocks, 2) if type is GGUFType.Q4_1 else None
    return Int4(by_row(_nibbles(blocks)), _half(blocks, 0), mins)


def split_int8(data: np.ndarray, type: GGUFType) -> Int8:
    """Unpack rows of Q8_0 (q is -128..127), Q5_0 (-16..15) or Q5_1 (0..31)."""
    blocks = split_blocks(data, type)
    mins = _half(blocks, 2) if type is GGUFType.Q5_1 else None
    if type is GGUFType.Q8_0:
        q = bit_fields(blocks, 2, 34, bits=8, run=32)
    else:
        fifth_bits = np.unpackbits(np.ascontiguousarray(blocks[..., -20:-16]), bitorder="little").view(np.uint64)
        fifth_bits <<= np.uint64(4)
        q = _nibbles(blocks)
        q |= fifth_bits.view(np.uint8).reshape(q.shape)
        if type is GGUFType.Q5_0:
            q -= 16  # wraps around in uint8, which is correct for the bytes as int8
    return Int8(by_row(q.view(np.int8)), _half(blocks, 0), mins)


def split_iq4_nl(data: np.ndarray) -> Lut:
    """Unpack rows of IQ4_NL, which has the blocks of Q4_0 with indices into a look-up table."""
    blocks = split_blocks(data, GGUFType.IQ4_NL)
    return Lut(by_row(_nibbles(blocks)), _half(blocks, 0), table=IQ4_NL_TABLE)


def _half(blocks: np.ndarray, offset: int) -> Tensor:
    return torch.from_numpy(halves(blocks, offset))


def _nibbles(blocks: np.ndarray) -> np.ndarray:
    """Unpack the last 16 bytes of each block to 32 values: [rows, blocks, 32]."""
    block_bytes = blocks.shape[-1]
    return bit_fields(blocks, block_bytes - 16, block_bytes, bits=4, run=16)


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


def two_level_reference(data: np.ndarray, type: GGUFType) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Integers [rows, cols] of Q4_K or Q6_K, then the integers [rows, groups] and factors [rows, blocks] of the scales,
    and for Q4_K of the minimums."""
    blocks = split_blocks(data, type)
    if type is GGUFType.Q6_K:
        scales = by_row(blocks[..., 192:208].copy().view(np.int8))
        return by_row(_q6_k_integers(blocks)), [(scales, by_row(halves(blocks, 208)))]
    low, high, shared = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = np.concatenate([low & 63, shared & 15 | low >> 2 & 48], axis=-1).view(np.int8)
    mins = np.concatenate([high & 63, shared >> 4 | high >> 2 & 48], axis=-1).view(np.int8)
    q = bit_fields(blocks, 16, 144, bits=4, run=32)
    factors = by_row(halves(blocks, 0)), -by_row(halves(blocks, 2))
    return by_row(q), list(zip((by_row(scales), by_row(mins)), factors, strict=True))


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
    values = split_integers(blocks).astype(np.float32)
    values *= np.repeat(scales, 16, axis=-1)
    if mins is not None:
        values += np.repeat(mins, 16, axis=-1)
    with np.errstate(invalid="ignore"):  # infinities of a damaged block
        return values if dtype is np.float32 else np.rint(values).astype(dtype)


def _float(blocks: np.ndarray, offset: int) -> np.ndarray:
    """Read the fp16 number at a byte offset of every block, as fp32: [rows, blocks, 1]."""
    return halves(blocks, offset).astype(np.float32)[..., None]


def _fp16_unless_too_large(*numbers: np.ndarray) -> list[np.ndarray]:
    """Convert all numbers to fp16, or return them unchanged if one is too large (as no useful weight has)."""
    if all(abs(values).max() <= FP16_MAX for values in numbers):
        return [values.astype(np.float16) for values in numbers]
    return list(numbers)
