#include "attention/store_kv_cache_cpu.h"

#include "attention/store_kv_cache.h"
#include "common/cpu/parallel.h"

namespace fastinfer::cpu::FASTINFER_ISA {

void store_kv_cache(const StoreKvCacheParams& p) {
  const KvCacheSlots& cache = p.cache;
  dispatch(p.dtype, [&]<class T>(T) {
    parallel_for(p.tokens, [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) {
        const int64_t slot = cache.slot_mapping[token];
        if (slot < 0) continue;
        const T* k = static_cast<const T*>(p.k) + token * p.k_stride;
        const T* v = static_cast<const T*>(p.v) + token * p.v_stride;
        for (int head = 0; head < cache.heads; ++head) {
          const int64_t at = static_cast<int64_t>(head) * cache.head_dim;
          store_head<kInt4KeyGroup>(cache, k + at, cache.k, cache.k_scale, slot, head);
          store_head<kInt4ValueGroup>(cache, v + at, cache.v, cache.v_scale, slot, head);
        }
      }
    });
  });
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
