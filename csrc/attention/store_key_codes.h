// Codes of four bits of the keys that have just been written to the cache, see key_codes.h.
#pragma once

#include "attention/key_codes.h"
#include "attention/paged_attention.h"

namespace fastinfer {

// Of store_value_codes, too, whose cache and codes are those of the values.
struct StoreCodesParams {
  const void* cache;            // keys [num_blocks, block_size, heads, head_dim]; of int4 two elements a byte
  const void* scale;            // as in PagedAttentionParams
  const int64_t* slot_mapping;  // [tokens]; -1 is skipped
  uint32_t* codes;              // [num_blocks, heads, key_code_words, block_size]
  int64_t tokens;
  int64_t slots;
  int block_size;
  int heads;
  int head_dim;
  CacheQuantization quantization;
  DType cache_dtype;  // if not quantized
};

}  // namespace fastinfer

FASTINFER_CPU_KERNEL(store_key_codes, StoreCodesParams)

namespace fastinfer::cuda {
FASTINFER_API void store_key_codes(const StoreCodesParams& params, void* stream);
}
