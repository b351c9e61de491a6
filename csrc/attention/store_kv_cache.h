// Writes tokens' keys and values into their slots of the paged cache.
#pragma once

#include <cstdint>

#include "common/cpu/isa.h"
#include "common/dtype.h"

namespace fastinfer {

struct StoreKvCacheParams {
  const void* k;  // [tokens, kv_heads * head_dim], tokens k_stride elements apart
  const void* v;  // likewise, v_stride
  void* k_cache;  // [num_blocks * block_size, kv_heads * head_dim]
  void* v_cache;
  const int64_t* slot_mapping;  // [tokens], -1 is skipped
  int64_t tokens;
  int64_t k_stride;
  int64_t v_stride;
  int64_t slots;
  int64_t row;  // kv_heads * head_dim
  DType dtype;  // of k and v
  DType cache_dtype;
};

}  // namespace fastinfer

FASTINFER_CPU_KERNEL(store_kv_cache, StoreKvCacheParams)
