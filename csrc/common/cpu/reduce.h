// Reductions that stay in registers: the lanes of four vectors at once, and one vector's maximum. Each folds neighbours
// within 128 bits first, then halves, so that a vector's sum does not depend on its place.
#pragma once

#include <type_traits>

#include "common/cpu/vec.h"

namespace fastinfer::cpu::FASTINFER_ISA {

typedef float f32x4 __attribute__((vector_size(16)));
typedef int32_t i32x4 __attribute__((vector_size(16)));

template <class V>
using Quarter = std::conditional_t<std::is_same_v<V, f32v>, f32x4, i32x4>;

// Within each 128 bits: a0 with a1, a2 with a3, b0 with b1, b2 with b3.
template <class V, class Combine>
FASTINFER_INLINE V fold_neighbours(V a, V b, Combine&& combine) {
#if !defined(FASTINFER_VECTOR_SHUFFLES)
  const i32x4 even = {0, 2, 4, 6};
#elif defined(FASTINFER_AVX512_VNNI)
  const i32v even = {0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30};
#else
  const i32v even = {0, 2, 8, 10, 4, 6, 12, 14};
#endif
  return combine(__builtin_shuffle(a, b, even), __builtin_shuffle(a, b, even + 1));
}

// The lanes of a, b, c and d, each combined to one.
template <class V, class Combine>
FASTINFER_INLINE Quarter<V> reduce(V a, V b, V c, V d, Combine&& combine) {
  Quarter<V> parts[kLanes / 4];
#if defined(FASTINFER_VECTOR_SHUFFLES)
  store_as(parts, fold_neighbours(fold_neighbours(a, b, combine), fold_neighbours(c, d, combine), combine));
#else
  Quarter<V> of[4][kLanes / 4];  // wide shuffles would be split into scalars
  store_as(of[0], a), store_as(of[1], b), store_as(of[2], c), store_as(of[3], d);
  for (int i = 0; i < kLanes / 4; ++i) {
    parts[i] = fold_neighbours(fold_neighbours(of[0][i], of[1][i], combine),
                               fold_neighbours(of[2][i], of[3][i], combine), combine);
  }
#endif
  for (int width = kLanes / 8; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) parts[i] = combine(parts[i], parts[i + width]);
  }
  return parts[0];
}

template <class V>
FASTINFER_INLINE Quarter<V> reduce_add(V a, V b, V c, V d) {
  return reduce(a, b, c, d, [](auto x, auto y) __attribute__((always_inline)) { return x + y; });
}

FASTINFER_INLINE i32x4 reduce_max(i32v a, i32v b, i32v c, i32v d) {
  return reduce(a, b, c, d, [](auto x, auto y) __attribute__((always_inline)) { return x > y ? x : y; });
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
