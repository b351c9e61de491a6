// Squares of numbers transposed in registers.
#pragma once

#include "common/cpu/vec.h"

namespace fastinfer::cpu::FASTINFER_ISA {

#if defined(FASTINFER_AVX512_VNNI)

// 16 rows of 16 numbers to columns.
FASTINFER_INLINE void transpose16(const float* from, int from_stride, float* to, int to_stride) {
  f32v a[16], b[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) a[i] = load(from + i * from_stride);
  // Each stage puts every other element, pair, four and eight of two rows side by side.
  const i32v low1 = {0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30}, high1 = low1 + 1;
  const i32v low2 = {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29}, high2 = low2 + 2;
  const i32v low4 = {0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27}, high4 = low4 + 4;
  const i32v low8 = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23}, high8 = low8 + 8;
  const auto stage = [](const f32v(&in)[16], f32v(&out)[16], int distance, i32v low, i32v high)
                         __attribute__((always_inline)) {
#pragma GCC unroll 16
                           for (int i = 0; i < 16; ++i) {
                             if ((i & distance) != 0) continue;
                             out[i] = __builtin_shuffle(in[i], in[i + distance], low);
                             out[i + distance] = __builtin_shuffle(in[i], in[i + distance], high);
                           }
                         };
  stage(a, b, 1, low1, high1);
  stage(b, a, 2, low2, high2);
  stage(a, b, 4, low4, high4);
  stage(b, a, 8, low8, high8);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) store(to + i * to_stride, a[i]);
}

#endif

}  // namespace fastinfer::cpu::FASTINFER_ISA
