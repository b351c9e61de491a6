// Where tokens' keys and values go in the paged cache, and in what form: the destination of store_kv_cache and of
// norm_rotary_store.
#pragma once

#include <cstdint>

#include "attention/paged_attention.h"

namespace fastinfer {

struct KvCacheSlots {
  void* k;  // [slots, heads, head_dim]; of int4 two elements a byte
  void* v;
  void* k_scale;  // float [slots, heads] for int8 and fp8; Int4Scale [slots, heads, groups] for int4; else null
  void* v_scale;
  const int64_t* slot_mapping;  // [tokens]; -1 is skipped
  int64_t slots;
  int heads;
  int head_dim;
  CacheQuantization quantization;
  DType dtype;  // where it is not quantized
};

}  // namespace fastinfer
