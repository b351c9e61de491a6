// Writes tokens' keys and values into their slots of the paged cache.
#pragma once

#include "attention/kv_cache_slots.h"
#include "common/api.h"

namespace fastinfer {

struct StoreKvCacheParams {
  const void* k;  // [tokens, heads, head_dim], tokens k_stride elements apart
  const void* v;  // likewise, v_stride
  int64_t tokens;
  int64_t k_stride;
  int64_t v_stride;
  DType dtype;  // of k and v
  KvCacheSlots cache;
};

}  // namespace fastinfer

FASTINFER_CPU_KERNEL(store_kv_cache, StoreKvCacheParams)

namespace fastinfer::cuda {
FASTINFER_API void store_kv_cache(const StoreKvCacheParams& params, void* stream);
}
