// How select_tokens is launched on a GPU: a token's positions are scored by several blocks, so that a single sequence
// keeps the whole GPU busy, and then chosen by one.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "attention/select_largest_plan.h"
#include "common/dtype.h"
#include "common/launch_config.h"

namespace fastinfer::cuda {

inline constexpr int kScoreThreads = 128;
inline constexpr int kScoreBlocks = 4;       // that a multiprocessor has registers for
inline constexpr int kScorePositions = 128;  // that a block scores at once, 32 a warp
inline constexpr int kIndexDim = 128;        // most elements of a key; fewer are filled up with zeros
inline constexpr int kChooseThreads = 1024;
inline constexpr int kChooseDigitBits = 11;        // three digits
inline constexpr int64_t kScoresAtOnce = 1 << 25;  // 128 MB, unless one token has more

// Heads as products take them.
FASTINFER_HOST_DEVICE constexpr int padded_heads(int heads) {
  return (heads + 7) / 8 * 8;
}

struct SelectTokensPlan {
  int parts;                   // blocks that score a token
  int64_t stride;              // scores from token to token; 0: no token has more positions than it reads
  int64_t group;               // tokens that are scored at once, then chosen for
  LaunchConfig score, choose;  // of a whole group
};

inline SelectTokensPlan plan_select_tokens(int64_t tokens, int heads, int head_dim, int64_t positions, int64_t width,
                                           const Device& device) {
  if (head_dim % 8 != 0 || head_dim > kIndexDim) {
    throw std::runtime_error("select_tokens: on CUDA q must have a head_dim that is a multiple of 8 and at most " +
                             std::to_string(kIndexDim) + ", got " + std::to_string(head_dim));
  }
  // The queries, and the weights of their heads.
  const size_t shared = static_cast<size_t>(padded_heads(heads)) * (kIndexDim * 2 + sizeof(float));
  if (shared > device.shared_bytes) {
    throw std::runtime_error("select_tokens: " + std::to_string(heads) + " heads need " + std::to_string(shared) +
                             " bytes of shared memory, the GPU has " + std::to_string(device.shared_bytes));
  }
  const int64_t stride = positions > width ? (positions + 31) / 32 * 32 : 0;
  const int64_t group =
      stride == 0 ? tokens : std::clamp<int64_t>(kScoresAtOnce / stride, 1, std::max<int64_t>(tokens, 1));
  const int64_t tiles = (positions + kScorePositions - 1) / kScorePositions;
  const int64_t blocks = int64_t{kScoreBlocks} * device.multiprocessors;
  const int64_t parts = std::clamp<int64_t>(blocks / std::max<int64_t>(group, 1), 1, std::max<int64_t>(tiles, 1));
  return {
      .parts = static_cast<int>(parts),
      .stride = stride,
      .group = group,
      .score = {.grid = group,
                .block = kScoreThreads,
                .shared_bytes = shared,
                .grid_y = static_cast<unsigned>(parts),
                .dependent = true},
      .choose = {.grid = group,
                 .block = kChooseThreads,
                 .shared_bytes = select_largest_bytes(kChooseThreads, kChooseDigitBits),
                 .dependent = true},
  };
}

}  // namespace fastinfer::cuda
