// For each query and KV head the pages of the cache with the largest sums of estimated probabilities.
#pragma once

#include <cstdint>

#include "attention/key_codes.h"
#include "attention/select_pages_plan.h"
#include "common/api.h"
#include "common/cpu/isa.h"
#include "common/dtype.h"

namespace fastinfer {

// Besides those with the largest weights: the first page, which attention sinks are in, and the last two, as the newest
// tokens count most.
inline constexpr int kFirstPages = 1, kLastPages = 2;

struct SelectPagesParams {
  const void* q;               // [tokens, q_heads, head_dim], tokens q_stride elements apart
  const uint32_t* codes;       // [num_blocks, kv_heads, key_code_words, block_size]
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
  // CUDA only:
  float* workspace = nullptr;   // [tokens, q_heads, max_blocks]: logits of pages, then weights
  uint32_t* arrived = nullptr;  // [tokens, kv_heads] counters, zero before and after the launch
  cuda::SelectPagesPlan plan{};
};

}  // namespace fastinfer

FASTINFER_CPU_KERNEL(select_pages, SelectPagesParams)

namespace fastinfer::cuda {
FASTINFER_API void select_pages(const SelectPagesParams& params, void* stream);
}
