// The prologue of attention in one pass: RMSNorm of each head of q and k, and perhaps of v, rotary embedding of q and
// k, and the store of k and v into the paged cache.
#pragma once

#include "attention/kv_cache_slots.h"
#include "common/api.h"

namespace fastinfer {

struct NormRotaryStoreParams {
  void* q;        // [tokens, q_heads, head_dim], tokens q_stride elements apart; changed in place
  const void* k;  // [tokens, heads of the cache, head_dim], likewise
  const void* v;
  const void* q_norm_weight;  // [head_dim] or null
  const void* k_norm_weight;
  const int64_t* positions;    // [tokens]
  const float* cos_sin_cache;  // [max_position, rotary_dim]: cosines, then sines
  const float* query_scales;   // [max_position] or null: factors of the queries at each position
  int64_t tokens;
  int64_t q_stride;
  int64_t k_stride;
  int64_t v_stride;
  int64_t max_position;
  int q_heads;
  int rotary_dim;
  float eps;
  bool norm_v;         // whether the heads of v are normalised, without a weight
  bool interleaved;    // pairs (2i, 2i + 1) instead of (i, i + rotary_dim / 2)
  DType dtype;         // of q, k and v
  DType weight_dtype;  // of the norms' weights
  KvCacheSlots cache;
};

}  // namespace fastinfer

FASTINFER_CPU_KERNEL(norm_rotary_store, NormRotaryStoreParams)

namespace fastinfer::cuda {
FASTINFER_API void norm_rotary_store(const NormRotaryStoreParams& params, void* stream);
}
