// The pages of the cache that hold a share of the estimated attention of some queries, for each KV head.
#pragma once

#include <cstdint>

#include "attention/key_codes.h"
#include "attention/select_pages_plan.h"
#include "common/api.h"
#include "common/cpu/isa.h"
#include "common/dtype.h"

namespace fastinfer {

// That are read in any case: the first page, which attention sinks are in, and the last two, as the newest tokens count
// most.
inline constexpr int kFirstPages = 1, kLastPages = 2;

// Of the tokens of a row every so many'th is looked at, counted from the last one.
inline constexpr int kQueryStride = 4;

// Weights of pages are integers, so that their sums are exact in any order. Those of a row have about this sum.
inline constexpr float kSumOfWeights = 1 << 30;

// The sum of weights that the chosen pages must have.
FASTINFER_HOST_DEVICE inline int64_t wanted_weight(int64_t sum, double share) {
  return static_cast<int64_t>(static_cast<double>(sum) * share + 0.5);
}

struct SelectPagesParams {
  const void* q;                // [tokens, q_heads, head_dim], tokens q_stride elements apart
  const uint32_t* codes;        // [num_blocks, kv_heads, key_code_words, block_size]
  const int32_t* block_table;   // [seqs, max_blocks]
  const int32_t* seq_lens;      // [seqs]
  const int32_t* query_start;   // [seqs + 1]; its last element may be beyond the tokens
  const int32_t* row_start;     // [rows + 1]; null if each token is a row
  const uint32_t* value_codes;  // [num_blocks, kv_heads, value_code_words]; null if nothing attends to the other pages
  void* rest;                   // [rows, q_heads, head_dim]: attention to the pages that are not chosen
  float* rest_lse;              // [rows, q_heads]: natural logarithm of the sum of its exponentials
  int32_t* pages;               // [rows, kv_heads, max_blocks]
  int32_t* lens;                // [rows, kv_heads]
  int64_t rows;
  int64_t seqs;
  int64_t q_stride;
  int64_t max_blocks;
  int64_t num_blocks;
  double share;         // of the attention that the chosen pages have
  int num_dense_pages;  // a row that sees no more of them reads them all
  int block_size;
  int q_heads;
  int kv_heads;
  int head_dim;
  float scale;  // of the logits
  DType dtype;  // of q
  // CUDA only:
  float* workspace = nullptr;   // [rows, q_heads, max_blocks]: logits of pages, then weights
  uint32_t* arrived = nullptr;  // [rows, kv_heads] counters, zero before and after the launch
  cuda::SelectPagesPlan plan{};

  // Whether a row that sees so many pages reads them all.
  FASTINFER_HOST_DEVICE bool reads_all(int pages) const {
    return share >= 1.0 || pages <= num_dense_pages || pages <= kFirstPages + kLastPages;
  }
};

}  // namespace fastinfer

FASTINFER_CPU_KERNEL(select_pages, SelectPagesParams)

namespace fastinfer::cuda {
FASTINFER_API void select_pages(const SelectPagesParams& params, void* stream);
}
