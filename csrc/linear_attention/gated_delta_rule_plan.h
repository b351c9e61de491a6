// How `gated_delta_rule` is launched: the recurrence, then the norm of its outputs.
#pragma once

#include "linear_attention/state_plan.h"

namespace fastinfer::cuda {

inline constexpr int kDeltaNorms = 4;  // a block of the norm: one per warp

struct GatedDeltaRulePlan {
  StatePlan rule;
  LaunchConfig norm;
};

inline GatedDeltaRulePlan plan_gated_delta_rule(int64_t seqs, int64_t tokens, int64_t heads, int64_t key_dim,
                                                int64_t value_dim, bool channel_decay, const Device& device) {
  // Key and query, and perhaps decays; values; four numbers, one of which is the decay otherwise.
  const PreparedToken token{.columns = channel_decay ? 3 : 2, .vectors = 1, .numbers = channel_decay ? 3 : 4};
  return {
      .rule = plan_states(seqs, tokens, heads, key_dim, value_dim, token, device),
      .norm = {.grid = (tokens * heads + kDeltaNorms - 1) / kDeltaNorms, .block = 32 * kDeltaNorms, .dependent = true},
  };
}

}  // namespace fastinfer::cuda
