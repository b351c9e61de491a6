// Rotation of one head, shared by the operator and the fused prologue of decode.
#pragma once

#include "common/cpu/vec.h"

namespace fastinfer::cpu::FASTINFER_ISA {

template <class T>
FASTINFER_INLINE void rotate_halves(T* head, const float* cos, const float* sin, int half) {
  for_each_vector(half, [&](int64_t i, int64_t lanes) {
    const f32v x = load_lanes(head + i, lanes), y = load_lanes(head + half + i, lanes);
    const f32v c = load_lanes(cos + i, lanes), s = load_lanes(sin + i, lanes);
    store_lanes(head + i, x * c - y * s, lanes);
    store_lanes(head + half + i, y * c + x * s, lanes);
  });
}

template <class T>
FASTINFER_INLINE void rotate_pairs(T* head, const float* cos, const float* sin, int half) {
  for (int i = 0; i < half; ++i) {
    const float x = to_float(head[2 * i]), y = to_float(head[2 * i + 1]);
    head[2 * i] = from_float<T>(x * cos[i] - y * sin[i]);
    head[2 * i + 1] = from_float<T>(y * cos[i] + x * sin[i]);
  }
}

// `table`: a row of cos_sin_cache, cosines, then sines.
template <class T>
FASTINFER_INLINE void rotate_head(T* head, const float* table, int rotary_dim, bool interleaved) {
  const int half = rotary_dim / 2;
  interleaved ? rotate_pairs(head, table, table + half, half) : rotate_halves(head, table, table + half, half);
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
