// The prologue of multi-head latent attention in one pass: the rotation of the queries, which are joined from their two
// parts, RMSNorm of the latent, rotation of the key that all heads share, and the store of both as one row of the
// cache.
#pragma once

#include "attention/kv_cache_slots.h"
#include "common/api.h"

namespace fastinfer {

struct LatentRotaryStoreParams {
  const void* q_latent;        // [tokens, heads, rank]
  const void* q_rope;          // [tokens, heads, rotary_dim], q_rope_stride and q_rope_head_stride elements apart
  const void* kv;              // [tokens, rank + rotary_dim], kv_stride elements apart
  const void* norm_weight;     // [rank]
  const int64_t* positions;    // [tokens]
  const float* cos_sin_cache;  // [max_position, rotary_dim]: cosines, then sines
  const float* query_scales;   // [max_position] or null: factors of the queries at each position
  void* out;                   // [tokens, heads, rank + rotary_dim]
  int64_t tokens;
  int64_t q_rope_stride;
  int64_t q_rope_head_stride;
  int64_t kv_stride;
  int64_t max_position;
  int heads;
  int rank;
  int rotary_dim;
  float eps;
  bool interleaved;    // pairs (2i, 2i + 1) instead of (i, i + rotary_dim / 2)
  DType dtype;         // of queries, kv and out
  DType weight_dtype;  // of norm_weight
  KvCacheSlots cache;  // of one head, whose keys alone are stored
};

}  // namespace fastinfer

FASTINFER_CPU_KERNEL(latent_rotary_store, LatentRotaryStoreParams)

namespace fastinfer::cuda {
FASTINFER_API void latent_rotary_store(const LatentRotaryStoreParams& params, void* stream);
}
