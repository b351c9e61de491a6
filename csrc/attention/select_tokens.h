// For each query the cached tokens with the highest scores of an indexer.
#pragma once

#include <cstdint>

#include "attention/select_tokens_plan.h"
#include "common/api.h"
#include "common/cpu/isa.h"
#include "common/dtype.h"

namespace fastinfer {

struct SelectTokensParams {
  const void* q;               // [tokens, heads, head_dim], tokens q_stride elements apart
  const void* weights;         // [tokens, heads], tokens weight_stride elements apart
  const void* keys;            // [num_blocks, block_size, head_dim]
  const int32_t* block_table;  // [seqs, max_blocks]
  const int32_t* seq_lens;     // [seqs]
  const int32_t* query_start;  // [seqs + 1]; its last element may be beyond the tokens
  int32_t* slots;              // [tokens, width]
  int32_t* lens;               // [tokens]
  int64_t tokens;
  int64_t seqs;
  int64_t q_stride;
  int64_t weight_stride;
  int64_t max_blocks;
  int64_t num_blocks;
  int width;
  int block_size;
  int heads;
  int head_dim;
  DType dtype;  // of q and weights
  DType key_dtype;
  // CUDA only:
  uint32_t* workspace = nullptr;  // [plan.group, plan.stride]: scores of the tokens of a group
  cuda::SelectTokensPlan plan{};
};

}  // namespace fastinfer

FASTINFER_CPU_KERNEL(select_tokens, SelectTokensParams)

namespace fastinfer::cuda {
FASTINFER_API void select_tokens(const SelectTokensParams& params, void* stream);
}
