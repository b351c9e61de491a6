// The least and the largest element of each channel of the keys in a page, by which select_pages bounds their products
// with a query.
#pragma once

#include "attention/paged_attention.h"

namespace fastinfer {

struct StorePageBoundsParams {
  const void* k_cache;          // [num_blocks, block_size, heads, head_dim]; of int4 two elements a byte
  const void* k_scale;          // as in PagedAttentionParams
  const int64_t* slot_mapping;  // [tokens]; -1 is skipped
  BFloat16* bounds;             // [num_blocks, heads, 2, head_dim]
  int64_t tokens;
  int64_t slots;
  int block_size;
  int heads;
  int head_dim;
  CacheQuantization quantization;
  DType cache_dtype;  // if not quantized
};

}  // namespace fastinfer

FASTINFER_CPU_KERNEL(store_page_bounds, StorePageBoundsParams)

namespace fastinfer::cuda {
FASTINFER_API void store_page_bounds(const StorePageBoundsParams& params, void* stream);
}
