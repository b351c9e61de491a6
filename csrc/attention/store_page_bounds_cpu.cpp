#include "attention/store_page_bounds.h"

#include <limits>

#include "attention/kv_tile_cpu.h"
#include "common/cpu/parallel.h"

namespace fastinfer::cpu::FASTINFER_ISA {
namespace {

// One key to fp32; what is beyond its elements up to a multiple of kLanes is of no use.
template <class C>
void widen_key(const StorePageBoundsParams& p, int64_t row, float* out) {
  if constexpr (kGroupScales<C>) {
    const int groups = int4_groups(p.head_dim, kInt4KeyGroup);
    widen_int4<kInt4KeyGroup>(static_cast<const C*>(p.k_cache) + row * p.head_dim / 2,
                              static_cast<const Int4Scale*>(p.k_scale) + row * groups, p.head_dim, out);
  } else {
    const float scale = kRowScales<C> ? static_cast<const float*>(p.k_scale)[row] : 1.0f;
    const C* const key = static_cast<const C*>(p.k_cache) + row * p.head_dim;
    for_each_vector(p.head_dim, [&](int64_t i, int64_t lanes) { store(out + i, load_lanes(key + i, lanes) * scale); });
  }
}

// v where `away` is false or v has no more bits than bf16, else the next number of bf16 that is farther from zero.
FASTINFER_INLINE f32v round_away(f32v v, i32v away) {
  const u32v bits = (u32v)v, inexact = (u32v)((bits & 0xffffu) != 0) & (u32v)away;
  return select(v == v, (f32v)((bits & 0xffff0000u) + (inexact & 0x10000u)), v);
}

template <class C>
void store_bounds(const StorePageBoundsParams& p, int64_t block, int head) {
  const int64_t columns = (p.head_dim + kLanes - 1) / kLanes * kLanes;
  float* const key = scratch_array<float>(0, 3 * columns);
  float *const least = key + columns, *const largest = least + columns;
  std::fill_n(least, columns, std::numeric_limits<float>::infinity());
  std::fill_n(largest, columns, -std::numeric_limits<float>::infinity());
  for (int j = 0; j < p.block_size; ++j) {
    widen_key<C>(p, (block * p.block_size + j) * p.heads + head, key);
    for (int64_t i = 0; i < columns; i += kLanes) {
      const f32v v = load(key + i), low = load(least + i), high = load(largest + i);
      // A NaN stays: no comparison with it is true.
      store(least + i, select((low <= v) | (low != low), low, v));
      store(largest + i, select((high >= v) | (high != high), high, v));
    }
  }
  BFloat16* const out = p.bounds + (block * p.heads + head) * 2 * p.head_dim;
  for_each_vector(p.head_dim, [&](int64_t i, int64_t lanes) {
    const f32v low = load(least + i), high = load(largest + i);
    store_lanes(out + i, round_away(low, low < 0.0f), lanes);
    store_lanes(out + p.head_dim + i, round_away(high, high > 0.0f), lanes);
  });
}

}  // namespace

void store_page_bounds(const StorePageBoundsParams& p) {
  const auto run = [&]<class C>(C) {
    parallel_for(p.tokens, [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) {
        const int64_t slot = p.slot_mapping[token];
        if (slot < 0 || (slot + 1) % p.block_size != 0) continue;
        for (int head = 0; head < p.heads; ++head) store_bounds<C>(p, slot / p.block_size, head);
      }
    });
  };
  switch (p.quantization) {
    case CacheQuantization::kInt8: return run(Int8{});
    case CacheQuantization::kFp8: return run(E4m3{});
    case CacheQuantization::kInt4: return run(Int4Pair{});
    default: dispatch(p.cache_dtype, run);
  }
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
