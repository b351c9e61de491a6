// How `gated_delta_rule` is launched: the recurrence, then the norm of its outputs.
#pragma once

#include "common/launch_config.h"

namespace fastinfer::cuda {

inline constexpr int kDeltaColumns = 32;  // of a state, to a block
inline constexpr int kDeltaRows = 32;     // of a state, to a warp: in registers, all tokens through
inline constexpr int kDeltaTokens = 8;    // whose keys, queries and gates a block prepares at a time
inline constexpr int kDeltaNorms = 4;     // a block of the norm: one per warp

struct GatedDeltaRulePlan {
  int warps;          // of a block of the recurrence
  int column_blocks;  // of a state
  LaunchConfig rule, norm;
};

inline GatedDeltaRulePlan plan_gated_delta_rule(int64_t seqs, int64_t tokens, int64_t heads, int64_t key_dim,
                                                int64_t value_dim) {
  const int64_t warps = (key_dim + kDeltaRows - 1) / kDeltaRows;
  const int64_t column_blocks = (value_dim + kDeltaColumns - 1) / kDeltaColumns;
  // Keys, queries and values; three numbers of each token; partial sums of two products, twice.
  const int64_t floats = kDeltaTokens * (2 * warps * kDeltaRows + kDeltaColumns + 3) + 4 * warps * kDeltaColumns;
  return {
      .warps = static_cast<int>(warps),
      .column_blocks = static_cast<int>(column_blocks),
      .rule = {.grid = seqs * heads * column_blocks,
               .block = static_cast<unsigned>(32 * warps),
               .shared_bytes = static_cast<size_t>(floats) * sizeof(float),
               .dependent = true},
      .norm = {.grid = (tokens * heads + kDeltaNorms - 1) / kDeltaNorms, .block = 32 * kDeltaNorms, .dependent = true},
  };
}

}  // namespace fastinfer::cuda
