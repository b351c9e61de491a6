// Causal attention of ragged queries over a paged KV cache.
#pragma once

#include <cstdint>
#include <limits>

#include "common/api.h"
#include "common/cpu/isa.h"
#include "common/dtype.h"

namespace fastinfer {

// The first position that a query sees. A window ends with the query; a chunk begins at a multiple of its length.
FASTINFER_HOST_DEVICE inline int first_visible(int position, int window, bool chunked) {
  if (window == 0 || position < window) return 0;
  return chunked ? position - position % window : position - window + 1;
}

// The elements of a cache: floats; integers or small floats with a factor scale[position, head]; or four bits, see
// kv_int4.h.
enum class CacheQuantization { kNone, kInt8, kFp8, kInt4 };

struct PagedAttentionParams {
  const void* q;                  // [tokens, q_heads, head_dim], tokens q_stride elements apart
  const void* k_cache;            // [num_blocks, block_size, kv_heads, head_dim]; of int4 two elements a byte
  const void* v_cache;            // likewise; or k_cache, if the values are the first value_dim elements of the keys
  const void* k_scale = nullptr;  // float [num_blocks, block_size, kv_heads] for int8 and fp8; Int4Scale
  const void* v_scale = nullptr;  // [num_blocks, block_size, kv_heads, groups] for int4; else null
  const int32_t* block_table;     // [seqs, max_blocks], or [seqs, kv_heads, max_blocks]
  const int32_t* seq_lens;        // [seqs], the queries included; or [seqs, kv_heads]
  const int32_t* query_start;     // [seqs + 1]
  const float* sinks;             // [q_heads] or null
  float* lse;                     // [tokens, q_heads] or null
  void* out;                      // [tokens, q_heads, value_dim]
  int64_t seqs;
  int64_t q_stride;
  int64_t max_blocks;
  int64_t num_blocks;
  int block_size;
  int q_heads;
  int kv_heads;
  int head_dim;
  int value_dim;  // head_dim, or less with values in the keys
  int window;     // 0: none
  bool chunked;   // the windows are chunks, see first_visible
  float scale;
  float softcap;                        // 0: none
  DType dtype;                          // of q and out
  DType cache_dtype = DType::kFloat32;  // if not quantized
  CacheQuantization quantization = CacheQuantization::kNone;
  // CUDA only, see paged_attention_plan.h:
  int32_t* plan = nullptr;
  float* workspace = nullptr;
  int blocks = 0;
  // Each KV head has a block table and lengths of its own.
  bool table_per_head = false;
  // CPU only: tokens from m on are left out, if there are any.
  int64_t m = std::numeric_limits<int64_t>::max();
  // Tokens from this one on are a prompt's: in bf16 where the CPU multiplies it (binding/prompt_rows.h).
  int64_t first_prompt_row = std::numeric_limits<int64_t>::max();

  FASTINFER_HOST_DEVICE int first_visible(int position) const {
    return fastinfer::first_visible(position, window, chunked);
  }

  // The row of the block table, and of the lengths, that a sequence has for a KV head.
  FASTINFER_HOST_DEVICE int table_row(int seq, int kv_head) const {
    return table_per_head ? seq * kv_heads + kv_head : seq;
  }

  // Number of lengths.
  FASTINFER_HOST_DEVICE int64_t lens() const {
    return table_per_head ? seqs * kv_heads : seqs;
  }

  // Each row of the cache is a key, and its first elements are the value.
  FASTINFER_HOST_DEVICE bool values_in_keys() const {
    return value_dim < head_dim;
  }
};

}  // namespace fastinfer

FASTINFER_CPU_KERNEL_BF16_PROMPTS(paged_attention, PagedAttentionParams)

namespace fastinfer::cuda {
FASTINFER_API void paged_attention(const PagedAttentionParams& params, void* stream);
}
