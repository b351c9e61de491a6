// How the heads of a step are spread over lanes and blocks: a group of lanes takes one head of one token, 16 bytes a
// lane.
#pragma once

#include <algorithm>
#include <bit>

#include "common/dtype.h"
#include "common/launch_config.h"

namespace fastinfer::cuda {

struct HeadPlan {
  int lanes;  // lanes of a warp that share a head: a power of two
  LaunchConfig launch;
};

// Floats from head to head in shared memory: the lanes of a warp's heads, an eighth of a head's elements each, meet
// different banks, and 32-byte vectors stay aligned.
FASTINFER_HOST_DEVICE constexpr int head_stride(int head_dim) {
  return head_dim + head_dim / 64 * 8;
}

// `vector` elements are one access; each head needs `shared_bytes` of shared memory. Blocks: [tokens, groups of heads].
inline HeadPlan plan_heads(int64_t tokens, int heads, int head_dim, int vector, size_t shared_bytes) {
  const int vectors = (head_dim + vector - 1) / vector;
  const int lanes = static_cast<int>(std::bit_ceil(static_cast<unsigned>(std::clamp(vectors, 1, 32))));
  // Small blocks, so that one token is spread over several multiprocessors.
  int threads = std::clamp((heads * lanes + 31) / 32 * 32, 32, 128);
  while (threads > 32 && threads / lanes * shared_bytes > kDefaultSharedBytes) threads -= 32;
  const int groups = threads / lanes;
  return {
      .lanes = lanes,
      .launch = {.grid = tokens,
                 .block = static_cast<unsigned>(threads),
                 .shared_bytes = groups * shared_bytes,
                 .grid_y = static_cast<unsigned>((heads + groups - 1) / groups),
                 .dependent = true},
  };
}

}  // namespace fastinfer::cuda
