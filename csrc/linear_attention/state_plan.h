// How a recurrence over the tokens of sequences is launched: what `gated_delta_rule` and `mamba2_scan` share.
#pragma once

#include <algorithm>

#include "common/launch_config.h"

namespace fastinfer::cuda {

inline constexpr int kStateThreads = 128;     // of a block: with a state, and as many that prepare tokens
inline constexpr int kPreparedElements = 16;  // of a token's row, which a thread prepares

// Threads that prepare a token, and tokens that a block prepares at a time, of a state with so many rows.
constexpr int preparing_lanes(int rows) {
  return rows / kPreparedElements;
}
constexpr int prepared_tokens(int rows) {
  return kStateThreads / preparing_lanes(rows);
}

// What a block prepares of a token: vectors as long as a state's columns, others as long as its part of the rows, and
// single numbers.
struct PreparedToken {
  int columns = 2;
  int vectors;
  int numbers;
};

struct StatePlan {
  int rows;     // that the registers of a warp have room for
  int columns;  // of a state, to a block: 32 rows of a column to a thread
  bool ahead;   // the next tokens are prepared by threads of their own
  LaunchConfig launch;
};

inline StatePlan plan_states(int64_t seqs, int64_t tokens, int64_t heads, int64_t state_rows, int64_t state_columns,
                             PreparedToken token, const Device& device) {
  const int rows = state_rows <= 128 ? 128 : 256, columns = kStateThreads * 32 / rows;
  const int lanes = preparing_lanes(rows), at_once = prepared_tokens(rows);
  // Few tokens are prepared before the first one is computed, by the threads with the state.
  const bool ahead = tokens > at_once * seqs;
  // Vectors are padded. Twice with `ahead`.
  const int64_t floats = token.columns * (rows + lanes) + token.vectors * (columns + lanes) + token.numbers;
  auto shared_bytes = static_cast<size_t>((ahead ? 2 : 1) * at_once * floats) * sizeof(float);
  // Two blocks may meet on one multiprocessor while another one has none, unless they do not fit together.
  const int64_t grid = seqs * heads * ((state_columns + columns - 1) / columns);
  if (ahead && grid <= device.multiprocessors) shared_bytes = std::max(shared_bytes, device.shared_bytes / 2 + 1024);
  return {
      .rows = rows,
      .columns = columns,
      .ahead = ahead,
      .launch = {.grid = grid,
                 .block = static_cast<unsigned>(ahead ? 2 * kStateThreads : kStateThreads),
                 .shared_bytes = shared_bytes,
                 .dependent = true},
  };
}

}  // namespace fastinfer::cuda
