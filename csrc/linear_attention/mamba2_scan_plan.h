// How `mamba2_scan` is launched: the recurrence, then the norm of its outputs.
#pragma once

#include "linear_attention/state_plan.h"

namespace fastinfer::cuda {

inline constexpr int kScanNormThreads = 256;  // of a block, which normalises a token's group of heads

struct Mamba2ScanPlan {
  StatePlan scan;
  LaunchConfig norm;
};

inline Mamba2ScanPlan plan_mamba2_scan(int64_t seqs, int64_t tokens, int64_t heads, int64_t groups, int64_t state_dim,
                                       int64_t head_dim, const Device& device) {
  return {
      // b and c; x and gates; three numbers.
      .scan = plan_states(seqs, tokens, heads, state_dim, head_dim, {.vectors = 2, .numbers = 3}, device),
      .norm = {.grid = tokens * groups,
               .block = kScanNormThreads,
               .shared_bytes = kScanNormThreads / 32 * sizeof(float),
               .dependent = true},
  };
}

}  // namespace fastinfer::cuda
