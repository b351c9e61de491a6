// What store_key_codes and store_value_codes share: reading a row of the cache, and its levels of four bits.
#pragma once

#include <algorithm>

#include "attention/key_codes_cpu.h"
#include "attention/kv_tile_cpu.h"
#include "attention/store_key_codes.h"
#include "common/cpu/quantize_row.h"

namespace fastinfer::cpu::FASTINFER_ISA {

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
