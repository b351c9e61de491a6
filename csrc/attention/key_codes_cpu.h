// The rotation of keys, values and queries before they are rounded, see key_codes.h.
#pragma once

#include <algorithm>

#include "attention/key_codes.h"
#include "common/cpu/vec.h"

namespace fastinfer::cpu::FASTINFER_ISA {

// Elements of a row to be rotated: whole vectors.
FASTINFER_INLINE int rotated_columns(int head_dim) {
  return (head_dim + kLanes - 1) / kLanes * kLanes;
}

// Replaces each run of a row by its product with the Hadamard matrix, without a factor. The row has rotated_columns
// elements, of which those beyond head_dim are 0 and stay 0.
FASTINFER_INLINE void rotate(float* x, int head_dim) {
  const int size = hadamard_size(head_dim), columns = rotated_columns(head_dim);
  const auto lanes = [] {
    i32v v{};
    for (int i = 0; i < kLanes; ++i) v[i] = i;
    return v;
  }();
  for (int step = 1; step < std::min(size, kLanes); step *= 2) {
    const i32v partners = lanes ^ step, is_second = (lanes & step) != 0;
    for (int i = 0; i < columns; i += kLanes) {
      const f32v v = load(x + i);
      store(x + i, __builtin_shuffle(v, partners) + select(is_second, -v, v));
    }
  }
  for (int step = kLanes; step < size; step *= 2) {
    for (int first = 0; first < columns; first += 2 * step) {
      for (int i = first; i < first + step; i += kLanes) {
        const f32v a = load(x + i), b = load(x + i + step);
        store(x + i, a + b);
        store(x + i + step, a - b);
      }
    }
  }
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
