// The sum of what a token's experts computed, by their weights: out = residual + sum over i of weight_i * x_i. Where
// ranks have some experts each, the sum over those of this rank.
#pragma once

#include <cstdint>

#include "common/api.h"
#include "common/cpu/isa.h"
#include "common/dtype.h"

namespace fastinfer {

struct CombineExpertsParams {
  const void* x;                // [tokens top_k, hidden]
  const float* expert_weights;  // [tokens, top_k]
  const int32_t* expert_ids;    // [tokens, top_k] or null: only rows of the experts start .. end - 1 are read
  const void* residual;         // [tokens, hidden] or null
  void* out;                    // [tokens, hidden]
  int64_t tokens;
  int64_t hidden;
  int64_t start;
  int64_t end;
  int top_k;
  DType dtype;  // of x, residual and out

  // Whether choice i of a token, whose choices begin at `token`, is added.
  FASTINFER_HOST_DEVICE bool has(int64_t token, int i) const {
    return expert_ids == nullptr || (expert_ids[token + i] >= start && expert_ids[token + i] < end);
  }
};

}  // namespace fastinfer

FASTINFER_CPU_KERNEL(combine_experts, CombineExpertsParams)

namespace fastinfer::cuda {
FASTINFER_API void combine_experts(const CombineExpertsParams& params, void* stream);
}
