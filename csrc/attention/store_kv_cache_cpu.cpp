#include "attention/store_kv_cache.h"

#include "common/cpu/parallel.h"
#include "common/cpu/vec.h"

namespace fastinfer::cpu::FASTINFER_ISA {

void store_kv_cache(const StoreKvCacheParams& p) {
  dispatch(p.dtype, [&]<class T>(T) {
    dispatch(p.cache_dtype, [&]<class C>(C) {
      const auto copy = [&](const void* from, int64_t stride, void* cache, int64_t token, int64_t slot) {
        const T* source = static_cast<const T*>(from) + token * stride;
        C* destination = static_cast<C*>(cache) + slot * p.row;
        for_each_vector(p.row, [&](int64_t i, int64_t lanes) {
          store_lanes(destination + i, load_lanes(source + i, lanes), lanes);
        });
      };
      parallel_for(p.tokens, [&](int64_t begin, int64_t end) {
        for (int64_t token = begin; token < end; ++token) {
          const int64_t slot = p.slot_mapping[token];
          if (slot < 0) continue;
          copy(p.k, p.k_stride, p.k_cache, token, slot);
          copy(p.v, p.v_stride, p.v_cache, token, slot);
        }
      });
    });
  });
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
