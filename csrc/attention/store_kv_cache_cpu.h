// One head of one token on its way into the cache, shared by the store and the fused prologue of decode.
#pragma once

#include "attention/kv_cache_slots.h"
#include "fused/quantize_row_cpu.h"

namespace fastinfer::cpu::FASTINFER_ISA {

template <class X>
FASTINFER_INLINE void store_head(const KvCacheSlots& cache, const X* x, void* to, float* scale, int64_t slot,
                                 int head) {
  const int64_t row = slot * cache.heads + head, at = row * cache.head_dim;
  switch (cache.quantization) {
    case CacheQuantization::kInt8: scale[row] = quantize_row(x, cache.head_dim, static_cast<Int8*>(to) + at); return;
    case CacheQuantization::kFp8: scale[row] = quantize_row(x, cache.head_dim, static_cast<E4m3*>(to) + at); return;
    default: break;
  }
  dispatch(cache.dtype, [&]<class C>(C) {
    C* out = static_cast<C*>(to) + at;
    for_each_vector(cache.head_dim,
                    [&](int64_t i, int64_t lanes) { store_lanes(out + i, load_lanes(x + i, lanes), lanes); });
  });
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
