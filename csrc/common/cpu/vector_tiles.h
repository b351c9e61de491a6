// Products of the blocks of common/cpu/tile_products.h in vectors, for CPUs that have vdpbf16ps but no tile registers.
// A sum takes pair after pair of inputs, so that it does not depend on the other rows.
#pragma once

#include "common/cpu/tile_products.h"

namespace fastinfer::cpu::FASTINFER_ISA {

// 8 rows of a tile times two tiles of 16 columns: 16 sums, two vectors of columns and a row's pair fill 19 of 32
// registers.
inline constexpr int kVectorRows = 8;

FASTINFER_INLINE void multiply_vector_rows(const uint8_t* a, TileRows b, int64_t steps, float* sums, int64_t stride) {
  f32v left[kVectorRows] = {}, right[kVectorRows] = {};
  for (int64_t step = 0; step < steps; ++step, a += kTileBytes, b.first += kTileBytes) {
    for (int pair = 0; pair < kTileRowBytes; pair += 4) {
      const uint8_t* const columns = b.first + pair / 4 * kTileRowBytes;
      const u16x32 b0 = load_as<u16x32>(columns), b1 = load_as<u16x32>(columns + b.next);
#pragma GCC unroll 8
      for (int row = 0; row < kVectorRows; ++row) {
        const f32v both = in_register(broadcast(load_as<float>(a + row * kTileRowBytes + pair)));
        left[row] = dpbf16(left[row], (u16x32)both, b0);
        right[row] = dpbf16(right[row], (u16x32)both, b1);
      }
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < kVectorRows; ++row) {
    store(sums + row * stride, left[row]);
    store(sums + row * stride + kLanes, right[row]);
  }
}

// Sets `sums`, [kM * 16, 32], rows `stride` elements apart: kM tiles of 16 rows times two tiles of 16 columns, over
// `steps`.
template <int kM>
[[gnu::noinline]] void multiply_tiles_in_vectors(TileRows a, TileRows b, int64_t steps, float* sums, int64_t stride) {
  for (int row = 0; row < kM * kTileSide; row += kVectorRows) {
    const uint8_t* const rows = a.first + row / kTileSide * a.next + row % kTileSide * kTileRowBytes;
    multiply_vector_rows(rows, b, steps, sums + row * stride, stride);
  }
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
