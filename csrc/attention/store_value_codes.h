// Codes of four bits of the values in blocks that have just been filled, by which select_pages attends to the pages
// that it does not choose.
//
// A value is rotated and rounded as a key is, see key_codes.h. But products with probabilities add up over tokens, so a
// word has eight tokens' codes of one channel: byte b of word [g][c] has those of the tokens 8 g + b, in its lower
// half, and 8 g + 4 + b, in channel c of the rotated value.
#pragma once

#include "attention/key_codes.h"
#include "attention/paged_attention.h"

namespace fastinfer {

struct StoreValueCodesParams {
  const void* v_cache;          // [num_blocks, block_size, heads, head_dim]; of int4 two elements a byte
  const void* v_scale;          // as in PagedAttentionParams
  const int64_t* slot_mapping;  // [tokens]; -1 is skipped
  uint32_t* codes;              // [num_blocks, heads, value_code_words]
  int64_t tokens;
  int64_t slots;
  int block_size;
  int heads;
  int head_dim;
  CacheQuantization quantization;
  DType cache_dtype;  // if not quantized
};

}  // namespace fastinfer

FASTINFER_CPU_KERNEL(store_value_codes, StoreValueCodesParams)
