// Rotary position embedding of queries and keys, in place.
#pragma once

#include <cstdint>

#include "common/api.h"
#include "common/cpu/isa.h"
#include "common/dtype.h"

namespace fastinfer {

struct RotaryEmbeddingParams {
  void* q;                     // [tokens, q_heads, head_dim], tokens q_stride elements apart
  void* k;                     // [tokens, kv_heads, head_dim], tokens k_stride elements apart
  const int64_t* positions;    // [tokens]
  const float* cos_sin_cache;  // [max_position, rotary_dim]: cosines, then sines
  int64_t tokens;
  int64_t q_stride;
  int64_t k_stride;
  int64_t max_position;
  int q_heads;
  int kv_heads;
  int head_dim;
  int rotary_dim;
  bool interleaved;  // pairs (2i, 2i + 1) instead of (i, i + rotary_dim / 2)
  DType dtype;
};

}  // namespace fastinfer

FASTINFER_CPU_KERNEL(rotary_embedding, RotaryEmbeddingParams)

namespace fastinfer::cuda {
FASTINFER_API void rotary_embedding(const RotaryEmbeddingParams& params, void* stream);
}
