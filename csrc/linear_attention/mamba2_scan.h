// The recurrence of Mamba-2 with what surrounds it in a layer. Per head, with the b and c of its group, the state
// S [state_dim, head_dim], dt = min(max(softplus(dt + dt_bias), dt_min), dt_max) and decay = exp(-exp(a_log) dt):
//   S = decay S + b (dt x)^T,  y = (S^T c + d x) * silu(z),
//   out = y, or with a norm y / sqrt(mean over the group's heads of y^2 + eps) * norm_weight.
#pragma once

#include <cstdint>

#include "common/api.h"
#include "common/cpu/isa.h"
#include "common/dtype.h"
#include "common/launch_config.h"
#include "linear_attention/state_slots.h"

namespace fastinfer {

inline constexpr int64_t kScanUnit = 16, kLargestScanDim = 256;  // state_dim and head_dim: multiples, at most

struct Mamba2ScanParams {
  const void* xbc;          // [tokens, x of heads x head_dim, b of groups x state_dim, c likewise]
  const void* z;            // [tokens, heads * head_dim]
  const void* dt;           // [tokens, heads]
  const float* a_log;       // [heads]
  const float* dt_bias;     // [heads]
  const float* d;           // [heads]
  const void* norm_weight;  // [heads * head_dim] or null
  float* state;             // [slots, heads, state_dim, head_dim]
  void* out;                // [tokens, heads * head_dim]
  float* outputs;           // scratch with a norm, [tokens, heads * head_dim]: y
  StateSlots slots;
  int64_t tokens;
  int64_t xbc_stride;  // elements between tokens
  int64_t z_stride;
  int64_t dt_stride;
  int64_t heads;
  int64_t groups;  // divides heads: head h has the b and c of group h / (heads / groups)
  int64_t state_dim;
  int64_t head_dim;
  float dt_min;
  float dt_max;
  float eps;
  DType dtype;  // of xbc, z and out
  DType dt_dtype;
  DType norm_weight_dtype;
  cuda::Device device{};  // CUDA
};

}  // namespace fastinfer

FASTINFER_CPU_KERNEL(mamba2_scan, Mamba2ScanParams)

namespace fastinfer::cuda {
FASTINFER_API void mamba2_scan(const Mamba2ScanParams& params, void* stream);
}
