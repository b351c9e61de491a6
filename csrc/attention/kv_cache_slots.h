// The destination of store_kv_cache and norm_rotary_store: the slots of the paged cache for the keys and values of the
// tokens, and their format.
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
  DType dtype;  // if not quantized
};

}  // namespace fastinfer
