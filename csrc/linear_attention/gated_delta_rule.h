// The gated delta rule with what surrounds it in a layer. Per value head, with its key head's q and k scaled to length
// 1, S [key_dim, value_dim], decay = exp(-exp(a_log) softplus(a + dt_bias)) and beta = beta_scale sigmoid(b):
//   d = beta (v - decay S^T k),  o = (decay S^T q + d (k . q)) / sqrt(key_dim),  S = decay S + k d^T,
//   out = o / sqrt(mean(o^2) + eps) * norm_weight * silu(z).
// d and o need the state of the token before alone, so that one sweep over it computes both.
//
// With a decay for each channel of a key (Kimi Delta Attention) it is a vector, D = diag(decay), and D S takes the
// place of decay S: S^T D k and S^T D q are the products with keys and queries that have been multiplied by it. No
// exponent is ever positive, as each token is computed from the state before it.
#pragma once

#include <cstdint>

#include "common/api.h"
#include "common/cpu/isa.h"
#include "common/dtype.h"
#include "common/launch_config.h"
#include "linear_attention/state_slots.h"

namespace fastinfer {

inline constexpr int64_t kDeltaHeadUnit = 16, kLargestDeltaHead = 256;  // key_dim and value_dim: multiples, at most
inline constexpr float kDeltaNormEps = 1e-6f;                           // in the length of q and k

struct GatedDeltaRuleParams {
  const void* qkv;          // [tokens, q of key_heads x key_dim, k likewise, v of value_heads x value_dim]
  const void* z;            // [tokens, value_heads * value_dim]
  const void* a;            // [tokens, value_heads]; with channel_decay [tokens, value_heads * key_dim]
  const void* b;            // [tokens, value_heads]
  const float* a_log;       // [value_heads]
  const float* dt_bias;     // [value_heads]; with channel_decay [value_heads * key_dim]
  const void* norm_weight;  // [value_dim]
  float* state;             // [slots, value_heads, key_dim, value_dim]
  void* out;                // [tokens, value_heads * value_dim]
  StateSlots slots;
  int64_t tokens;
  int64_t qkv_stride;  // elements between tokens
  int64_t z_stride;
  int64_t a_stride;
  int64_t b_stride;
  int64_t key_heads;
  int64_t value_heads;  // a multiple of key_heads: value head h has the keys of head h / (value_heads / key_heads)
  int64_t key_dim;
  int64_t value_dim;
  float eps;
  float beta_scale;
  float decay_bound;   // not 0: decay = exp(decay_bound sigmoid(exp(a_log) (a + dt_bias)))
  bool channel_decay;  // a decay for each channel of a key
  bool sigmoid_gate;   // sigmoid(z) instead of silu(z)
  DType dtype;         // of qkv, z and out
  DType a_dtype;
  DType b_dtype;
  DType norm_weight_dtype;
  cuda::Device device{};     // CUDA
  float* outputs = nullptr;  // CUDA: scratch, [tokens, value_heads * value_dim]: o
};

}  // namespace fastinfer

FASTINFER_CPU_KERNEL(gated_delta_rule, GatedDeltaRuleParams)

namespace fastinfer::cuda {
FASTINFER_API void gated_delta_rule(const GatedDeltaRuleParams& params, void* stream);
}
