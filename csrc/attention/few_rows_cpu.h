// Attention products of a few query rows, as decoding has: keys and values are converted on the way from the cache,
// where many rows would share a converted copy. Sums run in the order of the many-row products, so results are the same
// bit for bit.
#pragma once

#include "common/cpu/vec.h"

namespace fastinfer::cpu::FASTINFER_ISA {

inline constexpr int kFewRows = 4;  // 4 rows by 2 vectors of sums leave registers for the operands

typedef uint16_t u16x8 __attribute__((vector_size(16)));
typedef uint32_t u32x4 __attribute__((vector_size(16)));
typedef uint64_t u64x2 __attribute__((vector_size(16)));

// In 16 bits: half the shuffles of a transpose after conversion, and no way through memory.
FASTINFER_INLINE void transpose(u16x8 (&v)[8]) {
  u32x4 pairs[8], quads[8];
  for (int i = 0; i < 4; ++i) {
    const u16x8 a = v[2 * i], b = v[2 * i + 1];
    pairs[i] = (u32x4)__builtin_shuffle(a, b, (u16x8){0, 8, 1, 9, 2, 10, 3, 11});
    pairs[4 + i] = (u32x4)__builtin_shuffle(a, b, (u16x8){4, 12, 5, 13, 6, 14, 7, 15});
  }
  for (int i = 0; i < 4; ++i) {
    const u32x4 a = pairs[2 * i], b = pairs[2 * i + 1];
    quads[2 * i] = __builtin_shuffle(a, b, (u32x4){0, 4, 1, 5});
    quads[2 * i + 1] = __builtin_shuffle(a, b, (u32x4){2, 6, 3, 7});
  }
  for (int i = 0; i < 4; ++i) {
    const int from = i / 2 * 4 + i % 2;
    const u64x2 a = (u64x2)quads[from], b = (u64x2)quads[from + 2];
    v[2 * i] = (u16x8)__builtin_shuffle(a, b, (u64x2){0, 2});
    v[2 * i + 1] = (u16x8)__builtin_shuffle(a, b, (u64x2){1, 3});
  }
}

// scores[kRows][count] = q[kRows][head_dim] keys[count][head_dim]^T; count % kLanes == 0, head_dim % 8 == 0, C has 16
// bits.
template <int kRows, class C>
void multiply_keys(const float* q, int q_stride, const C* const* keys, int count, int head_dim, float* scores,
                   int scores_stride) {
  static_assert(sizeof(C) == 2);
  for (int j = 0; j < count; j += kLanes) {
    f32v sums[kRows] = {};
    for (int d = 0; d < head_dim; d += 8) {
      u16x8 block[kLanes / 8][8];
      for (int half = 0; half < kLanes / 8; ++half) {
        for (int i = 0; i < 8; ++i) block[half][i] = load_as<u16x8>(keys[j + 8 * half + i] + d);
        transpose(block[half]);
      }
      for (int i = 0; i < 8; ++i) {
        C column[kLanes];
        for (int half = 0; half < kLanes / 8; ++half) store_as(column + 8 * half, block[half][i]);
        const f32v key = load(column);
        for (int r = 0; r < kRows; ++r) sums[r] += key * q[r * q_stride + d + i];
      }
    }
    for (int r = 0; r < kRows; ++r) store(scores + r * scores_stride + j, sums[r]);
  }
}

// out[kRows][columns] += weights[kRows][count] values[count][columns]; columns % kLanes == 0.
template <int kRows, class C>
void multiply_values(const float* weights, int weights_stride, const C* const* values, int count, int columns,
                     float* out) {
  const auto run = [&]<int kVectors>(int column) {
    f32v sums[kRows][kVectors];
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kVectors; ++v) sums[r][v] = load(out + r * columns + column + v * kLanes);
    }
    for (int j = 0; j < count; ++j) {
      f32v value[kVectors];
      for (int v = 0; v < kVectors; ++v) value[v] = load(values[j] + column + v * kLanes);
      for (int r = 0; r < kRows; ++r) {
        for (int v = 0; v < kVectors; ++v) sums[r][v] += value[v] * weights[r * weights_stride + j];
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kVectors; ++v) store(out + r * columns + column + v * kLanes, sums[r][v]);
    }
  };
  int column = 0;
  for (; column + 2 * kLanes <= columns; column += 2 * kLanes) run.template operator()<2>(column);
  if (column < columns) run.template operator()<1>(column);
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
