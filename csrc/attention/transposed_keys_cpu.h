// Logits from a transposed copy of a tile's keys: its vectors are positions, so that no sum over lanes is left but that
// of the products along head_dim, which are added in the order of the other way (reduce_add): bit by bit the same
// logits.
#pragma once

#include "attention/kv_tile_cpu.h"
#include "common/cpu/transpose.h"

namespace fastinfer::cpu::FASTINFER_ISA {

#if defined(FASTINFER_AVX512_VNNI)

// The number of rows from which transposing pays.
inline constexpr int kTransposeFrom = 16;

// keys[kTile][columns] to [columns][kTile].
inline void transpose_keys(const float* keys, int columns, float* transposed) {
  for (int j = 0; j < kTile; j += 16) {
    for (int d = 0; d < columns; d += 16)
      transpose16(keys + j * columns + d, columns, transposed + d * kTile + j, kTile);
  }
}

// Computes the scores of kRows rows and 16 kVectors positions.
template <int kRows, int kVectors>
FASTINFER_INLINE void multiply_transposed_block(const float* q, int columns, const float* keys, float* scores) {
  f32v quarters[4][kRows * kVectors];
#pragma GCC unroll 4
  for (int quarter = 0; quarter < 4; ++quarter) {
    f32v(&total)[kRows * kVectors] = quarters[quarter];
    f32v pair[kRows * kVectors];
#pragma GCC unroll 4
    for (int lane = 0; lane < 4; ++lane) {
      f32v sums[kRows * kVectors];
      const auto add = [&](int d, bool first) __attribute__((always_inline)) {
        f32v key[kVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) key[v] = load(keys + d * kTile + v * kLanes);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          const f32v query = in_register(broadcast(q[r * columns + d]));
#pragma GCC unroll 4
          for (int v = 0; v < kVectors; ++v) {
            f32v& sum = sums[r * kVectors + v];
            sum = first ? query * key[v] : sum + query * key[v];
          }
        }
      };
      add(4 * quarter + lane, true);
      for (int d = 4 * quarter + lane + kLanes; d < columns; d += kLanes) add(d, false);
#pragma GCC unroll 16
      for (int i = 0; i < kRows * kVectors; ++i) {
        const f32v sum = in_register(sums[i]);  // or a lone product might be fused with the addition
        if (lane % 2 == 0) pair[i] = sum;
        if (lane == 1) total[i] = pair[i] + sum;
        if (lane == 3) total[i] += pair[i] + sum;
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const int i = r * kVectors + v;
      store(scores + r * kTile + v * kLanes, (quarters[0][i] + quarters[2][i]) + (quarters[1][i] + quarters[3][i]));
    }
  }
}

// scores[rows][kTile] = q[rows][columns] keys[columns][kTile], of each row what it sees and more.
inline void multiply_transposed_keys(const float* q, int columns, const Range* seen, int rows, const float* keys,
                                     float* scores) {
  constexpr int kVectors = 2, kWidth = kVectors * kLanes;
  const auto run = [&]<int kRows>(int row) {
    const int first = seen[row].first / kWidth * kWidth, end = seen[row + kRows - 1].end;
    for (int j = first; j < end; j += kWidth) {
      multiply_transposed_block<kRows, kVectors>(q + row * columns, columns, keys + j, scores + row * kTile + j);
    }
  };
  int row = 0;
  for (; row + 4 <= rows; row += 4) run.template operator()<4>(row);
  for (; row < rows; ++row) run.template operator()<1>(row);
}

#endif

}  // namespace fastinfer::cpu::FASTINFER_ISA
