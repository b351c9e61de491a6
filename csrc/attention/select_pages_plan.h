// How select_pages is launched on a GPU: a token's pages for one KV head are weighed by several blocks, so that a
// single sequence keeps the whole GPU busy.
#pragma once

#include <algorithm>
#include <bit>
#include <stdexcept>
#include <string>

#include "attention/key_codes.h"
#include "attention/select_largest_plan.h"
#include "common/launch_config.h"

namespace fastinfer::cuda {

inline constexpr int kSelectThreads = 256;
inline constexpr int kSelectBlocks = 3;  // that a multiprocessor has registers for
inline constexpr int kSelectWarps = kSelectThreads / 32;
inline constexpr int kSelectDigitBits = 8;  // of a weight
inline constexpr size_t kSelectLargestBytes = select_largest_bytes(kSelectThreads, kSelectDigitBits);

struct SelectPagesPlan {
  int lanes;  // lanes of a warp that share a page's tokens: a power of two
  int parts;  // blocks for a token's KV head
  LaunchConfig launch;
};

// Bytes of shared memory: the rounded queries, with two numbers each, and a row of each warp; once they are not needed
// any more, what selection takes.
FASTINFER_HOST_DEVICE constexpr size_t select_pages_scratch(int group, int head_dim) {
  const size_t queries = static_cast<size_t>(group) * (head_dim + 8) + sizeof(float) * kSelectWarps * head_dim;
  return queries > kSelectLargestBytes ? queries : kSelectLargestBytes;
}

inline SelectPagesPlan plan_select_pages(int64_t tokens, int q_heads, int kv_heads, int head_dim, int block_size,
                                         int64_t max_blocks, const Device& device) {
  if (head_dim > kMaxKeyCodeDim) {
    throw std::runtime_error("select_pages: on CUDA q must have a head_dim of at most " +
                             std::to_string(kMaxKeyCodeDim) + ", got " + std::to_string(head_dim));
  }
  const int lanes = static_cast<int>(std::bit_ceil(static_cast<unsigned>(std::min(block_size, 32))));
  const int64_t heads = tokens * kv_heads, round = kSelectThreads / lanes;
  const int64_t rounds = std::max<int64_t>((max_blocks + round - 1) / round, 1);
  const int64_t blocks = kSelectBlocks * device.multiprocessors;
  const int64_t parts = std::clamp<int64_t>(blocks / std::max<int64_t>(heads, 1), 1, rounds);
  const int group = q_heads / kv_heads;
  const size_t shared = select_pages_scratch(group, head_dim) + (kSelectWarps + 2 * group) * sizeof(float);
  if (shared > device.shared_bytes) {
    throw std::runtime_error("select_pages: " + std::to_string(group) + " query heads of a KV head with head_dim " +
                             std::to_string(head_dim) + " need " + std::to_string(shared) +
                             " bytes of shared memory, the GPU has " + std::to_string(device.shared_bytes));
  }
  return {
      .lanes = lanes,
      .parts = static_cast<int>(parts),
      .launch = {.grid = heads,
                 .block = kSelectThreads,
                 .shared_bytes = shared,
                 .grid_y = static_cast<unsigned>(parts),
                 .dependent = true},
  };
}

}  // namespace fastinfer::cuda
