// Reductions that stay in registers: the lanes of four vectors summed at once, and one vector's sum and maximum. Each
// folds neighbours within 128 bits first, then halves, so that a vector's sum does not depend on its place.
#pragma once

#include "common/cpu/vec.h"

namespace fastinfer::cpu::FASTINFER_ISA {

typedef float f32x4 __attribute__((vector_size(16)));
typedef int32_t i32x4 __attribute__((vector_size(16)));

// Within 128 bits: a0+a1, a2+a3, b0+b1, b2+b3.
FASTINFER_INLINE f32x4 add_neighbours(f32x4 a, f32x4 b) {
  return __builtin_shuffle(a, b, (i32x4){0, 2, 4, 6}) + __builtin_shuffle(a, b, (i32x4){1, 3, 5, 7});
}

#if defined(FASTINFER_VECTOR_SHUFFLES)
FASTINFER_INLINE f32v add_neighbours(f32v a, f32v b) {
#if defined(FASTINFER_AVX512_VNNI)
  const i32v even = {0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30};
#else
  const i32v even = {0, 2, 8, 10, 4, 6, 12, 14};
#endif
  return __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, even + 1);
}
#endif

// The sums of the lanes of a, b, c and d.
FASTINFER_INLINE f32x4 reduce_add(f32v a, f32v b, f32v c, f32v d) {
  f32x4 parts[kLanes / 4];
#if defined(FASTINFER_VECTOR_SHUFFLES)
  store_as(parts, add_neighbours(add_neighbours(a, b), add_neighbours(c, d)));
#else
  f32x4 of[4][kLanes / 4];  // wide shuffles would be split into scalars
  store_as(of[0], a), store_as(of[1], b), store_as(of[2], c), store_as(of[3], d);
  for (int i = 0; i < kLanes / 4; ++i) {
    parts[i] = add_neighbours(add_neighbours(of[0][i], of[1][i]), add_neighbours(of[2][i], of[3][i]));
  }
#endif
  for (int width = kLanes / 8; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) parts[i] += parts[i + width];
  }
  return parts[0];
}

// The maximum of one vector's lanes. A NaN may be lost.
FASTINFER_INLINE float max_of_lanes(f32v v) {
  f32x4 parts[kLanes / 4];
  store_as(parts, v);
  for (int width = kLanes / 8; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) parts[i] = parts[i] > parts[i + width] ? parts[i] : parts[i + width];
  }
  f32x4 other = __builtin_shuffle(parts[0], (i32x4){2, 3, 0, 1});
  const f32x4 pairs = parts[0] > other ? parts[0] : other;
  other = __builtin_shuffle(pairs, (i32x4){1, 0, 3, 2});
  return (pairs > other ? pairs : other)[0];
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
