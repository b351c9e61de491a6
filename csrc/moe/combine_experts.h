// The sum of what a token's experts computed, by their weights: out = residual + sum over i of weight_i * x_i.
#pragma once

#include <cstdint>

#include "common/api.h"
#include "common/cpu/isa.h"
#include "common/dtype.h"

namespace fastinfer {

struct CombineExpertsParams {
  const void* x;                // [tokens top_k, hidden]
  const float* expert_weights;  // [tokens, top_k]
  const void* residual;         // [tokens, hidden] or null
  void* out;                    // [tokens, hidden]
  int64_t tokens;
  int64_t hidden;
  int top_k;
  DType dtype;  // of x, residual and out
};

}  // namespace fastinfer

FASTINFER_CPU_KERNEL(combine_experts, CombineExpertsParams)

namespace fastinfer::cuda {
FASTINFER_API void combine_experts(const CombineExpertsParams& params, void* stream);
}
