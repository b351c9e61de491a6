// How `sample` is launched: a block per row, as wide as the vocabulary asks for.
#pragma once

#include <algorithm>
#include <bit>

#include "common/launch_config.h"

namespace fastinfer::cuda {

// Memory for the exchange between a block's warps, twice: while some warps read one part, others may write the other.
inline constexpr int kSampleExchange = 8 * 33;  // numbers

struct SamplePlan {
  int candidates;         // tokens that fit into shared memory to be sorted, a power of two
  int64_t pitch;          // between rows of modified logits, which need not be 16-byte aligned otherwise
  int64_t scratch_bytes;  // modified logits, where penalties, biases or a mask change them
  LaunchConfig launch;
};

// Depends on the vocabulary alone, so that a draw does not depend on the batch or the device. `modified`: with
// penalties, biases or a mask.
inline SamplePlan plan_sample(int64_t rows, int64_t vocab, bool modified) {
  SamplePlan plan{};
  // A sixteenth of a small vocabulary, so that it runs the same code as a large one; 2048 numbers are sorted in 66
  // steps, one comparison per thread each.
  plan.candidates = static_cast<int>(std::bit_ceil(static_cast<uint64_t>(std::clamp<int64_t>(vocab / 16, 32, 2048))));
  plan.pitch = (vocab + 3) / 4 * 4;
  plan.scratch_bytes = modified ? rows * plan.pitch * static_cast<int64_t>(sizeof(float)) : 0;
  // 128 tokens are the least that a warp works on: 16 bytes per lane.
  const auto warps = static_cast<unsigned>(std::clamp<int64_t>((vocab + 127) / 128, 1, 32));
  plan.launch = {
      .grid = rows,
      .block = 32 * warps,
      .shared_bytes = plan.candidates * sizeof(uint64_t) + 2 * kSampleExchange * sizeof(double) + 16,
      .dependent = true,
  };
  return plan;
}

}  // namespace fastinfer::cuda
