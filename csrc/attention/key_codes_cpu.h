// The rotation of keys, values and queries before they are rounded, and their levels of four bits, see key_codes.h.
#pragma once

#include <algorithm>

#include "attention/key_codes.h"
#include "attention/kv_tile_cpu.h"
#include "attention/store_key_codes.h"
#include "common/cpu/quantize_row.h"
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

// Row `row` of a cache's keys or values, rotated, to fp32 [rotated_columns]; an int4 cache has a scale for each kGroup
// elements.
template <class C, int kGroup>
void load_rotated(const void* cache, const void* scales, int64_t row, int head_dim, float* out) {
  if constexpr (kGroupScales<C>) {
    widen_int4<kGroup>(static_cast<const C*>(cache) + row * head_dim / 2,
                       static_cast<const Int4Scale*>(scales) + row * int4_groups(head_dim, kGroup), head_dim, out);
  } else {
    const float scale = kRowScales<C> ? static_cast<const float*>(scales)[row] : 1.0f;
    const C* const x = static_cast<const C*>(cache) + row * head_dim;
    for_each_vector(head_dim, [&](int64_t i, int64_t lanes) { store(out + i, load_lanes(x + i, lanes) * scale); });
  }
  std::fill(out + head_dim, out + rotated_columns(head_dim), 0.0f);
  rotate(out, head_dim);
}

// Calls run with a value of the type of the cache's elements.
template <class Run>
void dispatch_cache(const StoreCodesParams& p, const Run& run) {
  switch (p.quantization) {
    case CacheQuantization::kInt8: return run(Int8{});
    case CacheQuantization::kFp8: return run(E4m3{});
    case CacheQuantization::kInt4: return run(Int4Pair{});
    default: dispatch(p.cache_dtype, run);
  }
}

// Rounds a rotated row to codes [rotated_columns], and returns their scale.
FASTINFER_INLINE float round_to_levels(const float* x, int head_dim, int8_t* codes) {
  const RowScale level = row_scale(largest_magnitude(x, head_dim), kLargestKeyLevel);
  for (int i = 0; i < rotated_columns(head_dim); i += kLanes) {
    // From 0.5 upwards, where conversion rounds down.
    const f32v v = level.inverse == 0.0f ? f32v{} : load(x + i) * level.inverse;
    store_bytes(codes + i, __builtin_convertvector(v + (kLargestKeyLevel + 0.5f), i32v));
  }
  return level.scale;
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
