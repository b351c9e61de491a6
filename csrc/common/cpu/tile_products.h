// What kernels in tiles share: numbers become bf16, and a block of tiles goes through a product.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/cpu/tiles.h"
#include "common/cpu/transpose.h"
#include "common/cpu/vec.h"

namespace fastinfer::cpu::FASTINFER_ISA {

inline constexpr int kTileSide = 16;    // rows of a tile, and sums in each of them
inline constexpr int kTileInputs = 32;  // bf16 in a row of a tile: a step of a product
inline constexpr int kTileRowBytes = 64;
inline constexpr int kPanelSteps = 18;  // a panel of two tiles by so many takes 36 KB
inline constexpr int kPanelBytes = 2 * kPanelSteps * kTileBytes;

// bf16 of kLanes fp32 numbers: to nearest even, as float_to_bf16 in intrinsics.h. Tiles ignore denormals anyway.
FASTINFER_INLINE u32v bfloat16_bits(f32v v) {
  const u32v bits = (u32v)v, rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const u32v nan = (u32v)(v != v), denormal = (u32v)((bits & 0x7f800000u) == 0u), high = bits >> 16;
  return (nan & (high | 0x40u)) | (~nan & denormal & high & 0x8000u) | (~nan & ~denormal & rounded);
}

// Pairs of bf16 in 32-bit lanes: `even` in the low halves.
FASTINFER_INLINE u32v bfloat16_pairs(f32v even, f32v odd) {
#if defined(FASTINFER_AVX512_BF16)
  const u16x32 order = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                        8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return (u32v)__builtin_shuffle(float_to_bf16(even, odd), order);
#else
  return bfloat16_bits(even) | bfloat16_bits(odd) << 16;
#endif
}

FASTINFER_INLINE void store_bfloat16(void* out, f32v v) {
  store_as(out, __builtin_convertvector(bfloat16_bits(v), u16half));
}

// kTileInputs numbers to a row of a tile.
FASTINFER_INLINE void store_tile_row(void* out, const f32v (&v)[kTileInputs / kLanes]) {
#if defined(FASTINFER_AVX512_BF16)
  store_as(out, float_to_bf16(v[0], v[1]));
#else
  for (int i = 0; i < kTileInputs / kLanes; ++i) store_bfloat16(static_cast<uint8_t*>(out) + i * kLanes * 2, v[i]);
#endif
}

FASTINFER_INLINE void store_tile_row(void* out, const float* x) {
  f32v v[kTileInputs / kLanes];
  for (int i = 0; i < kTileInputs / kLanes; ++i) v[i] = load(x + i * kLanes);
  store_tile_row(out, v);
}

// 16 rows of 16 words to columns.
FASTINFER_INLINE void transpose_words(const uint8_t* from, uint8_t* to) {
#if defined(FASTINFER_AVX512_VNNI)
  transpose16(reinterpret_cast<const float*>(from), kTileSide, reinterpret_cast<float*>(to), kTileSide);
#else
  for (int i = 0; i < kTileSide; ++i) {
    for (int j = 0; j < kTileSide; ++j)
      std::memcpy(to + i * kTileRowBytes + j * 4, from + j * kTileRowBytes + i * 4, 4);
  }
#endif
}

// `rows` <= 16 rows of a matrix, `stride` elements apart, to the second tiles of products: for each step
// [16 pairs of inputs][16 rows] pairs. Rows and inputs that do not exist are zero.
template <class W>
void pack_columns(const W* first, int64_t stride, int64_t rows, int64_t inputs, int64_t steps, uint8_t* out) {
  alignas(64) uint8_t words[kTileBytes] = {};
  for (int64_t step = 0; step < steps; ++step, first += kTileInputs, inputs -= kTileInputs, out += kTileBytes) {
    for (int64_t row = 0; row < rows; ++row) {
      f32v v[kTileInputs / kLanes];
      for (int i = 0; i < kTileInputs / kLanes; ++i) {
        v[i] = load_lanes(first + row * stride + i * kLanes, std::clamp<int64_t>(inputs - i * kLanes, 0, kLanes));
      }
      store_tile_row(words + row * kTileRowBytes, v);
    }
    transpose_words(words, out);
  }
}

// Two rows of tiles, whose first tiles are `next` bytes apart; a row's tiles, one for each step, follow each other.
struct TileRows {
  const uint8_t* first;
  int64_t next;
};

#if defined(FASTINFER_TILES)

template <class Sum, int kSum, int kA, int kB>
FASTINFER_INLINE void multiply_tile(Tiles& tiles) {
  if constexpr (std::is_same_v<Sum, int32_t>) {
    tiles.multiply_bytes<kSum, kA, kB>();
  } else {
    tiles.multiply<kSum, kA, kB>();
  }
}

// kM tiles of 16 rows times two tiles of 16 columns, over `steps`: of bf16 with sums of fp32, or of bytes with sums of
// int32. Continues `sums`, [kM * 16, 32], rows `stride` elements apart, or starts them.
template <int kM, class Sum>
__attribute__((noinline)) void multiply_tiles(Tiles& tiles, TileRows a, TileRows b, int64_t steps, bool starts,
                                              Sum* sums, int64_t stride) {
  const int64_t row_bytes = stride * static_cast<int64_t>(sizeof(Sum));
  Sum* const second = sums + kTileSide * stride;
  if (starts) {
    tiles.zero<0>();
    tiles.zero<1>();
    if constexpr (kM == 2) {
      tiles.zero<2>();
      tiles.zero<3>();
    }
  } else {
    tiles.load<0>(sums, row_bytes);
    tiles.load<1>(sums + kTileSide, row_bytes);
    if constexpr (kM == 2) {
      tiles.load<2>(second, row_bytes);
      tiles.load<3>(second + kTileSide, row_bytes);
    }
  }
  for (int64_t step = 0; step < steps; ++step, a.first += kTileBytes, b.first += kTileBytes) {
    tiles.load_once<4>(a.first, kTileRowBytes);
    tiles.load<6>(b.first, kTileRowBytes);
    multiply_tile<Sum, 0, 4, 6>(tiles);
    tiles.load<7>(b.first + b.next, kTileRowBytes);
    multiply_tile<Sum, 1, 4, 7>(tiles);
    if constexpr (kM == 2) {
      tiles.load_once<5>(a.first + a.next, kTileRowBytes);
      multiply_tile<Sum, 2, 5, 6>(tiles);
      multiply_tile<Sum, 3, 5, 7>(tiles);
    }
  }
  tiles.store<0>(sums, row_bytes);
  tiles.store<1>(sums + kTileSide, row_bytes);
  if constexpr (kM == 2) {
    tiles.store<2>(second, row_bytes);
    tiles.store<3>(second + kTileSide, row_bytes);
  }
}

inline constexpr int64_t kUnitColumns = 2 * kTileSide, kBlockRows = 2 * kTileSide;

// Elements of the sums of so many rows with 32 columns.
inline int64_t sums_size(int64_t rows) {
  return (rows + kBlockRows - 1) / kBlockRows * kBlockRows * kUnitColumns;
}

// The products of `rows` rows with `units` times 32 columns. columns(unit, begin, end) returns steps begin .. end - 1,
// no more than kPanelSteps, of a unit's columns: a panel, which stays in the L1. done(unit, units, row, count) is
// called when the sums of `count` rows from `row` on with so many units are complete: with one panel for 32 rows of a
// unit at a time, whose sums begin at `sums` and stay in the L1, else for all at the end, and the sums of a unit are
// sums_size(rows) after those of the one before. A sum takes step after step, so that it does not depend on the panels,
// or on the other rows.
template <class Sum, class Columns, class Done>
void multiply_panels(Tiles& tiles, TileRows x, int64_t rows, int64_t steps, int64_t units, const Columns& columns,
                     Sum* sums, const Done& done) {
  constexpr int64_t kBlockSums = kBlockRows * kUnitColumns;
  const int64_t parts = std::max<int64_t>(1, (steps + kPanelSteps - 1) / kPanelSteps);  // one without steps, too
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t begin = steps * part / parts, end = steps * (part + 1) / parts;
    Sum* of_block = sums;
    for (int64_t unit = 0; unit < units; ++unit) {
      const TileRows panel = columns(unit, begin, end);
      for (int64_t row = 0; row < rows; row += kBlockRows) {
        if (parts > 1) {  // the next block's sums, which come from the L2 and would hold up the stores of these
          for (int64_t i = 0; i < kBlockSums; i += 16) __builtin_prefetch(of_block + kBlockSums + i, 1);
        }
        const TileRows block{x.first + row / kTileSide * x.next + begin * kTileBytes, x.next};
        const auto multiply = row + kTileSide < rows ? multiply_tiles<2, Sum> : multiply_tiles<1, Sum>;
        multiply(tiles, block, panel, end - begin, begin == 0, of_block, kUnitColumns);
        if (parts > 1) {
          of_block += kBlockSums;
        } else {
          done(unit, 1, row, std::min(kBlockRows, rows - row));
        }
      }
    }
  }
  if (parts > 1) done(0, units, 0, rows);
}

#endif

}  // namespace fastinfer::cpu::FASTINFER_ISA
