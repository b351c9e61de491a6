// How `gated_delta_rule` is launched: the recurrence, then the norm of its outputs.
#pragma once

#include <algorithm>

#include "common/launch_config.h"

namespace fastinfer::cuda {

inline constexpr int kDeltaThreads = 128;  // of a block: with a state, and as many that prepare tokens
inline constexpr int kDeltaElements = 16;  // of a key or query, which a thread prepares
inline constexpr int kDeltaNorms = 4;      // a block of the norm: one per warp

// Threads that prepare a token, and tokens that a block prepares at a time, of a state with so many rows.
constexpr int delta_lanes(int rows) {
  return rows / kDeltaElements;
}
constexpr int delta_tokens(int rows) {
  return kDeltaThreads / delta_lanes(rows);
}

struct GatedDeltaRulePlan {
  int rows;           // that the registers of a warp have room for
  int columns;        // of a state, to a block: 32 rows of a column to a thread
  bool ahead;         // the next tokens are prepared by threads of their own
  int column_blocks;  // of a state
  LaunchConfig rule, norm;
};

inline GatedDeltaRulePlan plan_gated_delta_rule(int64_t seqs, int64_t tokens, int64_t heads, int64_t key_dim,
                                                int64_t value_dim, const Device& device) {
  const int rows = key_dim <= 128 ? 128 : 256, columns = kDeltaThreads * 32 / rows;
  const int64_t column_blocks = (value_dim + columns - 1) / columns;
  const int lanes = delta_lanes(rows), at_once = delta_tokens(rows);
  // Few tokens are prepared before the first one is computed, by the threads with the state.
  const bool ahead = tokens > at_once * seqs;
  // Of each token: key and query, values, four numbers. Rows of the first three are padded. Twice with `ahead`.
  const int64_t floats = (ahead ? 2 : 1) * at_once * (2 * (rows + lanes) + columns + lanes + 4);
  auto shared_bytes = static_cast<size_t>(floats) * sizeof(float);
  // Two blocks may meet on one multiprocessor while another one has none, unless they do not fit together.
  const int64_t grid = seqs * heads * column_blocks;
  if (ahead && grid <= device.multiprocessors) shared_bytes = std::max(shared_bytes, device.shared_bytes / 2 + 1024);
  return {
      .rows = rows,
      .columns = columns,
      .ahead = ahead,
      .column_blocks = static_cast<int>(column_blocks),
      .rule = {.grid = grid,
               .block = static_cast<unsigned>(ahead ? 2 * kDeltaThreads : kDeltaThreads),
               .shared_bytes = shared_bytes,
               .dependent = true},
      .norm = {.grid = (tokens * heads + kDeltaNorms - 1) / kDeltaNorms, .block = 32 * kDeltaNorms, .dependent = true},
  };
}

}  // namespace fastinfer::cuda
