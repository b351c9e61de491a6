// How `mamba2_scan` is launched: the recurrence, then the norm of its outputs.
#pragma once

#include "common/launch_config.h"

namespace fastinfer::cuda {

inline constexpr int kScanColumns = 32;       // of a state, to a block
inline constexpr int kScanRows = 32;          // of a state, to a warp: in registers, all tokens through
inline constexpr int kScanTokens = 8;         // whose inputs a block prepares at a time
inline constexpr int kScanNormThreads = 256;  // of a block, which normalises a token's group of heads

struct Mamba2ScanPlan {
  int warps;          // of a block of the recurrence
  int column_blocks;  // of a state
  LaunchConfig scan, norm;
};

inline Mamba2ScanPlan plan_mamba2_scan(int64_t seqs, int64_t tokens, int64_t heads, int64_t groups, int64_t state_dim,
                                       int64_t head_dim) {
  const int64_t warps = (state_dim + kScanRows - 1) / kScanRows;
  const int64_t column_blocks = (head_dim + kScanColumns - 1) / kScanColumns;
  // b and c, x and two numbers of each token, and the warps' parts of its output.
  const int64_t floats = kScanTokens * (2 * warps * kScanRows + kScanColumns + 2 + warps * kScanColumns);
  return {
      .warps = static_cast<int>(warps),
      .column_blocks = static_cast<int>(column_blocks),
      .scan = {.grid = seqs * heads * column_blocks,
               .block = static_cast<unsigned>(32 * warps),
               .shared_bytes = static_cast<size_t>(floats) * sizeof(float),
               .dependent = true},
      .norm = {.grid = tokens * groups,
               .block = kScanNormThreads,
               .shared_bytes = kScanNormThreads / 32 * sizeof(float),
               .dependent = true},
  };
}

}  // namespace fastinfer::cuda
