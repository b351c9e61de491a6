// One head of one token on its way into the cache, shared by the store and the fused prologue of decode.
#pragma once

#include "attention/kv_cache_slots.h"
#include "attention/kv_int4_cpu.h"
#include "common/cpu/quantize_row.h"

namespace fastinfer::cpu::FASTINFER_ISA {

template <int kInt4Group, class X>
FASTINFER_INLINE void store_head(const KvCacheSlots& cache, const X* x, void* to, void* scales, int64_t slot,
                                 int head) {
  const int64_t row = slot * cache.heads + head, at = row * cache.head_dim;
  const auto quantize = [&]<class Q>(Q* out) {
    static_cast<float*>(scales)[row] = quantize_row(x, cache.head_dim, out + at);
  };
  switch (cache.quantization) {
    case CacheQuantization::kInt8: return quantize(static_cast<Int8*>(to));
    case CacheQuantization::kFp8: return quantize(static_cast<E4m3*>(to));
    case CacheQuantization::kInt4:
      return quantize_int4<kInt4Group>(x, cache.head_dim, static_cast<Int4Pair*>(to) + at / 2,
                                       static_cast<Int4Scale*>(scales) + row * int4_groups(cache.head_dim, kInt4Group));
    default: break;
  }
  dispatch(cache.dtype, [&]<class C>(C) {
    C* out = static_cast<C*>(to) + at;
    for_each_vector(cache.head_dim,
                    [&](int64_t i, int64_t lanes) { store_lanes(out + i, load_lanes(x + i, lanes), lanes); });
  });
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
