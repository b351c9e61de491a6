// How select_pages is launched on a GPU: a token's pages for one KV head are bounded by several blocks, so that a
// single sequence keeps the whole GPU busy.
#pragma once

#include <algorithm>
#include <bit>
#include <stdexcept>
#include <string>

#include "attention/select_largest_plan.h"
#include "common/dtype.h"
#include "common/launch_config.h"

namespace fastinfer::cuda {

inline constexpr int kSelectThreads = 256;
inline constexpr int kSelectBlocks = 3;  // that a multiprocessor has registers for
inline constexpr int kSelectWarps = kSelectThreads / 32;
inline constexpr int kSelectDigitBits = 8;  // of a weight
inline constexpr size_t kSelectLargestBytes = select_largest_bytes(kSelectThreads, kSelectDigitBits);

struct SelectPagesPlan {
  int lanes;  // lanes of a warp that share a page's bounds: a power of two
  int own;    // 16-byte vectors of them that a lane has
  int parts;  // blocks for a token's KV head
  LaunchConfig launch;
};

// Pages that a group of lanes reads at once; a lane holds four vectors of eight elements.
FASTINFER_HOST_DEVICE constexpr int pages_at_once(int own) {
  return 4 / own;
}

inline SelectPagesPlan plan_select_pages(int64_t tokens, int q_heads, int kv_heads, int head_dim, int64_t max_blocks,
                                         const Device& device) {
  const int vectors = head_dim / 4;  // the least and the largest elements, eight of bf16 each
  const int own = vectors <= 32 ? 1 : vectors <= 64 ? 2 : 4;
  if (vectors > 32 * own) {
    throw std::runtime_error("select_pages: on CUDA q must have a head_dim of at most 512, got " +
                             std::to_string(head_dim));
  }
  const int lanes = static_cast<int>(std::bit_ceil(static_cast<unsigned>((vectors + own - 1) / own)));
  const int64_t heads = tokens * kv_heads, round = kSelectThreads / lanes * pages_at_once(own);
  const int64_t rounds = std::max<int64_t>((max_blocks + round - 1) / round, 1);
  const int64_t blocks = kSelectBlocks * device.multiprocessors;
  const int64_t parts = std::clamp<int64_t>(blocks / std::max<int64_t>(heads, 1), 1, rounds);
  const size_t group = q_heads / kv_heads;
  // The queries and, once they are not needed any more, what selection takes; numbers of each warp and head.
  const size_t shared =
      std::max(group * 2 * head_dim * sizeof(float), kSelectLargestBytes) + (kSelectWarps + 2 * group) * sizeof(float);
  if (shared > device.shared_bytes) {
    throw std::runtime_error("select_pages: " + std::to_string(group) + " query heads of a KV head with head_dim " +
                             std::to_string(head_dim) + " need " + std::to_string(shared) +
                             " bytes of shared memory, the GPU has " + std::to_string(device.shared_bytes));
  }
  return {
      .lanes = lanes,
      .own = own,
      .parts = static_cast<int>(parts),
      .launch = {.grid = heads,
                 .block = kSelectThreads,
                 .shared_bytes = shared,
                 .grid_y = static_cast<unsigned>(parts),
                 .dependent = true},
  };
}

}  // namespace fastinfer::cuda
