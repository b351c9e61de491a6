"""Reference for the unpacking of GGUF blocks: whole arrays of numpy, operation by operation."""

from collections.abc import Callable

import gguf
import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor

from fastinfer.formats.gguf_rows import IQ4_NL_TABLE, ONE_SCALE_TYPES, TABLES
from fastinfer.formats.gguf_types import GGUFType
from fastinfer.formats.mxfp4 import MXFP4_TABLE
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
    if type is GGUFType.IQ4_XS:
        return split_iq4_xs(data, exact)
    if type is GGUFType.MXFP4:
        return split_mxfp4(data)
    if type in ONE_SCALE_TYPES:
        return split_one_scale(data, type)
    if type in GRID_SCALES and type not in GROUPS_OF_16:
        return split_grid(data, type, exact)
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


def split_iq4_xs(data: np.ndarray, exact: bool) -> Lut:
    """Unpack rows of IQ4_XS; scales are fp32, or fp16 if not exact."""
    blocks = split_blocks(data, GGUFType.IQ4_XS)
    high = np.ascontiguousarray(blocks[..., 2:4]).view(np.uint16)
    integers = [blocks[..., 4 + i // 2] >> i % 2 * 4 & 15 | (high[..., 0] >> 2 * i & 3) << 4 for i in range(8)]
    scales = _float(blocks, 0) * (np.stack(integers, axis=-1).astype(np.int8) - np.int8(32))
    if not exact:
        (scales,) = _fp16_unless_too_large(scales)
    return Lut(by_row(bit_fields(blocks, 8, 136, bits=4, run=16)), by_row(scales), table=IQ4_NL_TABLE)


def split_mxfp4(data: np.ndarray) -> Lut:
    """Unpack rows of MXFP4; scales are fp16, or fp32 if one of them is not a number of fp16."""
    blocks = split_blocks(data, GGUFType.MXFP4)
    scales = np.ldexp(np.float32(1), blocks[..., 0].astype(np.int32) - 128)
    with np.errstate(over="ignore"):
        rounded = scales.astype(np.float16)
    return Lut(by_row(_nibbles(blocks)), by_row(rounded if (rounded == scales).all() else scales), table=MXFP4_TABLE)


# Where blocks have their fp16 factors; IQ1_M's is spread over several bytes.
FACTORS = {
    GGUFType.Q2_K: (80, 82),
    GGUFType.Q3_K: (108,),
    **dict.fromkeys((GGUFType.Q4_1, GGUFType.Q5_1, GGUFType.Q4_K, GGUFType.Q5_K), (0, 2)),
    GGUFType.Q6_K: (208,),
    GGUFType.TQ1_0: (52,),
    GGUFType.TQ2_0: (64,),
}


def write_factors(blocks: np.ndarray, type: GGUFType, *numbers: np.ndarray) -> None:
    """Write fp16 numbers [rows, blocks] as the factors of blocks [rows, blocks, bytes]: one for each, or for all."""
    bits = [np.ascontiguousarray(n, np.float16).view(np.uint16)[..., None] for n in numbers]
    if type is GGUFType.IQ1_M:
        scales = blocks[..., 48:56].copy().view(np.uint16) & 0x0FFF
        scales |= bits[0] << np.array([12, 8, 4, 0], np.uint16) & 0xF000
        blocks[..., 48:56] = scales.view(np.uint8)
        return
    for index, offset in enumerate(FACTORS.get(type, (0,))):
        blocks[..., offset : offset + 2] = bits[index % len(bits)].view(np.uint8)


def random_blocks(type: GGUFType, rows: int, columns: int, scale: float = 0.01) -> np.ndarray:
    """Random blocks, [rows, row_bytes] uint8, whose scales are those of weights."""
    random = np.random.default_rng([type, rows, columns])
    blocks = random.integers(0, 256, (rows, columns // type.block_size, type.block_bytes), np.uint8)
    if type is GGUFType.MXFP4:
        blocks[..., 0] = random.integers(110, 125, blocks.shape[:2])
    elif type is GGUFType.NVFP4:
        blocks[..., :4] = random.integers(20, 60, (*blocks.shape[:2], 4))
    else:
        write_factors(blocks, type, *(random.normal(0, scale, blocks.shape[:2]) for _ in range(2)))
    return blocks.reshape(rows, -1)


def dequantize(data: np.ndarray, type: GGUFType) -> np.ndarray:
    """Compute the values of rows [rows, row_bytes] in fp32, as the gguf package does."""
    if type not in (GGUFType.Q1_0, GGUFType.Q2_0):  # which it does not read
        return gguf.quants.dequantize(data, gguf.GGMLQuantizationType(type))
    blocks = split_blocks(data, type)
    bits = np.unpackbits(blocks[..., 2:], axis=-1, bitorder="little").astype(np.float32)
    integers = 2 * bits - 1 if type is GGUFType.Q1_0 else bits[..., 0::2] + 2 * bits[..., 1::2] - 1
    return (_float(blocks, 0) * integers).reshape(len(data), -1)


def split_one_scale(data: np.ndarray, type: GGUFType) -> Int4:
    """Unpack rows of TQ1_0, TQ2_0, Q1_0 or Q2_0."""
    blocks = split_blocks(data, type).copy()
    (offset,) = FACTORS.get(type, (0,))
    scales = np.repeat(halves(blocks, offset), type.block_size // 32, axis=-1)
    write_factors(blocks, type, np.ones(blocks.shape[:2]))
    q = dequantize(blocks.reshape(len(data), -1), type) + 8
    return Int4(by_row(q.astype(np.uint8)), by_row(scales))


# The scales of a block's groups without its factor, [rows, blocks, groups] fp32, of types with grids.


def _iq1_s(blocks: np.ndarray) -> np.ndarray:
    return (2 * (_words(blocks, 34, 50, np.uint16) >> 12 & 7) + 1) / np.float32(8)


def _iq1_m(blocks: np.ndarray) -> np.ndarray:
    scales = _words(blocks, 48, 56, np.uint16)[..., None] >> np.array([0, 3, 6, 9], np.uint16) & 7
    return (2 * scales.reshape(*blocks.shape[:2], 16) + 1) / np.float32(8)


def _iq2_xxs(blocks: np.ndarray) -> np.ndarray:
    return (0.5 + (_words(blocks, 2, 66, np.uint32)[..., 1::2] >> 28).astype(np.float32)) / 4


def _iq2(begin: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda blocks: (0.5 + _two_nibbles(blocks, begin, begin + 8)) / 4


def _iq3_xxs(blocks: np.ndarray) -> np.ndarray:
    return (0.5 + (_words(blocks, 66, 98, np.uint32) >> 28).astype(np.float32)) / 2


def _iq3_s(blocks: np.ndarray) -> np.ndarray:
    return 1 + 2 * _two_nibbles(blocks, 106, 110)


def _words(blocks: np.ndarray, begin: int, end: int, dtype: DTypeLike) -> np.ndarray:
    return np.ascontiguousarray(blocks[..., begin:end]).view(dtype)


def _two_nibbles(blocks: np.ndarray, begin: int, end: int) -> np.ndarray:
    """Unpack bytes to twice as many numbers, the lower half of each byte first."""
    return bit_fields(blocks, begin, end, bits=4, run=1).astype(np.float32)


GRID_SCALES = {
    GGUFType.IQ1_S: _iq1_s,
    GGUFType.IQ1_M: _iq1_m,
    GGUFType.IQ2_XXS: _iq2_xxs,
    GGUFType.IQ2_XS: _iq2(66),
    GGUFType.IQ2_S: _iq2(74),
    GGUFType.IQ3_XXS: _iq3_xxs,
    GGUFType.IQ3_S: _iq3_s,
}


def _factor(blocks: np.ndarray, type: GGUFType) -> np.ndarray:
    """Read the factor of each block of a type with a grid, as fp32: [rows, blocks, 1]."""
    if type is not GGUFType.IQ1_M:
        return _float(blocks, 0)
    nibbles = (_words(blocks, 48, 56, np.uint16) >> 12) << np.array([0, 4, 8, 12], np.uint16)
    return np.bitwise_or.reduce(nibbles, axis=-1, keepdims=True).view(np.float16).astype(np.float32)


def _grid_integers(type: GGUFType) -> Integers:
    """Take the integers from the values of the gguf package, with a factor of 1 and without the groups' scales."""

    def split(blocks: np.ndarray) -> np.ndarray:
        scales = GRID_SCALES[type](blocks)
        ones = blocks.copy()
        write_factors(ones, type, np.ones(blocks.shape[:2]))
        values = dequantize(ones.reshape(blocks.shape[0], -1), type).reshape(*scales.shape, -1)
        integers = (values / scales[..., None]).reshape(*blocks.shape[:2], 256)
        assert (integers == np.rint(integers)).all()
        return integers.astype(np.int8)

    return split


def split_grid(data: np.ndarray, type: GGUFType, exact: bool) -> Lut | Int4:
    """Unpack rows of a type with a grid and groups of 32; scales are fp32, or fp16 if not exact."""
    blocks = split_blocks(data, type)
    if type is GGUFType.IQ3_S:
        scales = _factor(blocks, type) * GRID_SCALES[type](blocks)
        numbers = [np.float32(2) * scales, np.float32(-15) * scales]
        numbers = numbers if exact else _fp16_unless_too_large(*numbers)
        q = (_grid_integers(type)(blocks) + np.int8(15)) // np.int8(2)
        return Int4(by_row(q.astype(np.uint8)), *map(by_row, numbers))
    table = TABLES[type]
    places = np.zeros(256, np.uint8)
    places[table.to(torch.int8).numpy().view(np.uint8)] = np.arange(16)
    q = places[_grid_integers(type)(blocks).view(np.uint8)]
    scales = _factor(blocks, type) * GRID_SCALES[type](blocks)
    if not exact:
        (scales,) = _fp16_unless_too_large(scales)
    return Lut(by_row(q), by_row(scales), table=table)


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
    """Unpack rows in groups of 16 to dense fp32, or if not exact to 8-bit integers in groups of 32."""
    split_integers, split_scales, largest = GROUPS_OF_16[type]
    blocks = split_blocks(data, type)
    scales, mins = split_scales(blocks)
    columns = blocks.shape[1] * type.block_size
    if exact:
        return Dense(torch.from_numpy(_affine(split_integers, blocks, scales, mins).reshape(-1, columns)))
    joined = _join_pairs(scales, mins, largest, symmetric=type in GRID_SCALES)
    divisors = np.repeat(joined.astype(np.float32), 2, axis=-1)
    with np.errstate(invalid="ignore"):  # infinities of a damaged block
        np.divide(scales, divisors, out=scales, where=divisors != 0)
        if mins is not None:
            np.divide(mins, divisors, out=mins, where=divisors != 0)
    q = _affine(split_integers, blocks, scales, mins, np.int8)
    return Int8(torch.from_numpy(q.reshape(-1, columns)), by_row(joined))


def two_level_reference(data: np.ndarray, type: GGUFType) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Integers [rows, cols] of Q4_K, Q5_K or Q6_K, then the integers [rows, groups] and factors [rows, blocks] of the
    scales, and for Q4_K and Q5_K of the minimums."""
    blocks = split_blocks(data, type)
    if type is GGUFType.Q6_K:
        scales = by_row(blocks[..., 192:208].copy().view(np.int8))
        return by_row(_q6_k_integers(blocks)), [(scales, by_row(halves(blocks, 208)))]
    low, high, shared = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = np.concatenate([low & 63, shared & 15 | low >> 2 & 48], axis=-1).view(np.int8)
    mins = np.concatenate([high & 63, shared >> 4 | high >> 2 & 48], axis=-1).view(np.int8)
    if type is GGUFType.Q5_K:
        q = bit_fields(blocks, 48, 176, bits=4, run=32) | bit_fields(blocks, 16, 48, bits=1, run=32, shift=4)
    else:
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


def _grid_scales(type: GGUFType) -> Scales:
    return lambda blocks: (_factor(blocks, type) * GRID_SCALES[type](blocks), None)


# For each type: functions for integers and for scales and minimums, and the largest magnitude of an integer.
GROUPS_OF_16: dict[GGUFType, tuple[Integers, Scales, int]] = {
    GGUFType.Q6_K: (_q6_k_integers, _q6_k_scales, 32),
    GGUFType.Q3_K: (_q3_k_integers, _q3_k_scales, 4),
    GGUFType.Q2_K: (_q2_k_integers, _q2_k_scales, 3),
    GGUFType.IQ1_M: (_grid_integers(GGUFType.IQ1_M), _grid_scales(GGUFType.IQ1_M), 9),
    GGUFType.IQ2_XS: (_grid_integers(GGUFType.IQ2_XS), _grid_scales(GGUFType.IQ2_XS), 43),
    GGUFType.IQ2_S: (_grid_integers(GGUFType.IQ2_S), _grid_scales(GGUFType.IQ2_S), 43),
}


def _join_pairs(scales: np.ndarray, mins: np.ndarray | None, largest: int, symmetric: bool) -> np.ndarray:
    """Compute a common scale for each pair of groups of 16.

    Args:
        scales, mins: [rows, blocks, 16] fp32; ``mins`` may be ``None``.
        largest: largest magnitude of an integer.
        symmetric: whether the integers have it with both signs.

    Returns:
        [rows, blocks, 8], scales with which the values of both groups fit into 8 bits; fp16, or fp32 if one of them is
        too large for fp16.
    """
    first, second = scales[..., 0::2], scales[..., 1::2]
    if mins is None:
        limits = np.where((first < 0) == (second < 0), np.float32(128), np.float32(127))
        if symmetric:
            limits = np.float32(127 // largest * largest)
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
