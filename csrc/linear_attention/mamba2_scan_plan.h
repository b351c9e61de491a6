// How `mamba2_scan` is launched: the recurrence, then the norm of its outputs.
#pragma once

#include <algorithm>

#include "common/launch_config.h"

namespace fastinfer::cuda {

inline constexpr int kScanThreads = 128;      // of a block: with a state, and as many that prepare tokens
inline constexpr int kScanElements = 16;      // of a token's b and c, which a thread prepares
inline constexpr int kScanNormThreads = 256;  // of a block, which normalises a token's group of heads

// Threads that prepare a token, and tokens that a block prepares at a time, of a state with so many rows.
constexpr int scan_lanes(int rows) {
  return rows / kScanElements;
}
constexpr int scan_tokens(int rows) {
  return kScanThreads / scan_lanes(rows);
}

struct Mamba2ScanPlan {
  int rows;           // that the registers of a warp have room for
  int columns;        // of a state, to a block: 32 rows of a column to a thread
  bool ahead;         // the next tokens are prepared by threads of their own
  int column_blocks;  // of a state
  LaunchConfig scan, norm;
};

inline Mamba2ScanPlan plan_mamba2_scan(int64_t seqs, int64_t tokens, int64_t heads, int64_t groups, int64_t state_dim,
                                       int64_t head_dim, const Device& device) {
  const int rows = state_dim <= 128 ? 128 : 256, columns = kScanThreads * 32 / rows;
  const int64_t column_blocks = (head_dim + columns - 1) / columns;
  const int lanes = scan_lanes(rows), at_once = scan_tokens(rows);
  // Few tokens are prepared before the first one is computed, by the threads with the state.
  const bool ahead = tokens > at_once * seqs;
  // Of each token: b and c, x and gates, three numbers. Rows of the first four are padded. Twice with `ahead`.
  const int64_t floats = (ahead ? 2 : 1) * at_once * (2 * (rows + lanes) + 2 * (columns + lanes) + 3);
  auto shared_bytes = static_cast<size_t>(floats) * sizeof(float);
  // Two blocks may meet on one multiprocessor while another one has none, unless they do not fit together.
  const int64_t grid = seqs * heads * column_blocks;
  if (ahead && grid <= device.multiprocessors) shared_bytes = std::max(shared_bytes, device.shared_bytes / 2 + 1024);
  return {
      .rows = rows,
      .columns = columns,
      .ahead = ahead,
      .column_blocks = static_cast<int>(column_blocks),
      .scan = {.grid = grid,
               .block = static_cast<unsigned>(ahead ? 2 * kScanThreads : kScanThreads),
               .shared_bytes = shared_bytes,
               .dependent = true},
      .norm = {.grid = tokens * groups,
               .block = kScanNormThreads,
               .shared_bytes = kScanNormThreads / 32 * sizeof(float),
               .dependent = true},
  };
}

}  // namespace fastinfer::cuda
