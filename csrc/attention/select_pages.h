// For each query and KV head the pages of the cache with the largest bounds of their logits.
#pragma once

#include <cstdint>

#include "common/api.h"
#include "common/cpu/isa.h"
#include "common/dtype.h"

namespace fastinfer {

struct SelectPagesParams {
  const void* q;               // [tokens, q_heads, head_dim], tokens q_stride elements apart
  const BFloat16* bounds;      // [num_blocks, kv_heads, 2, head_dim]: least, largest
  const int32_t* block_table;  // [seqs, max_blocks]
  const int32_t* seq_lens;     // [seqs]
  const int32_t* query_start;  // [seqs + 1]; its last element may be beyond the tokens
  int32_t* pages;              // [tokens, kv_heads, width]
  int32_t* lens;               // [tokens]
  int64_t tokens;
  int64_t seqs;
  int64_t q_stride;
  int64_t max_blocks;
  int64_t num_blocks;
  int width;
  int block_size;
  int q_heads;
  int kv_heads;
  int head_dim;
  float scale;  // of the logits
  DType dtype;  // of q
};

}  // namespace fastinfer

FASTINFER_CPU_KERNEL(select_pages, SelectPagesParams)
