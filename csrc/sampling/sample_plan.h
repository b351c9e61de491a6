// How `sample` is launched. A row is cut into parts, of which each is a block's: about 16, so that a single row keeps
// several multiprocessors busy. The block that is done last puts the parts together.
#pragma once

#include <algorithm>
#include <bit>

#include "common/launch_config.h"

namespace fastinfer::cuda {

// Memory for the exchange between a block's warps, twice: while some warps read one part, others may write the other.
inline constexpr int kSampleExchange = 8 * 33;  // numbers

// Quads, 4 tokens each, of which a thread loads all at once and keeps in registers: 128 bytes on their way.
inline constexpr int kPartQuads = 8;

// The most threads of a block: three blocks of 80 registers a thread share a multiprocessor, so that the latencies of
// one are hidden behind the others.
inline constexpr int kSampleThreads = 256;

// What a block finds in its part of a row, for the last one.
struct alignas(16) SamplePart {
  float raw_maximum, raw_sum;  // of the unmodified logits, at temperature 1
  float maximum, sum;
  int token;       // the first that has the maximum
  int race_token;  // the winner of the part's race, if no filter is on
  double race_time;
  float floor;  // the part's tokens from here on are listed as candidates, if a filter is on
  int count;    // of them
};

struct SamplePlan {
  int parts;              // of a row
  int part_tokens;        // of each but the last
  int candidates;         // tokens that fit into shared memory to be sorted, a power of two
  int part_candidates;    // tokens that a part lists at most
  int64_t pitch;          // between rows of modified logits, which need not be 16-byte aligned otherwise
  int64_t scratch_bytes;  // modified logits, where penalties, biases or a mask change them
  int64_t parts_bytes;    // a SamplePart for each part, then the candidates of each; none for a single part
  LaunchConfig launch;    // [rows, parts]
};

// Depends on the vocabulary alone, so that a draw does not depend on the batch or the device. `modified`: with
// penalties, biases or a mask.
inline SamplePlan plan_sample(int64_t rows, int64_t vocab, bool modified) {
  SamplePlan plan{};
  // Whole groups of noise; at least two, so that a small vocabulary has parts, too.
  constexpr int kGroup = 256, kWarpTokens = 32 * 4 * kPartQuads;
  const int64_t most_groups = kSampleThreads / 32 * kWarpTokens / kGroup;
  plan.part_tokens = kGroup * static_cast<int>(std::clamp<int64_t>((vocab / 16 + kGroup - 1) / kGroup, 2, most_groups));
  // At least two warps, which a search by halves needs; a power of two, so that each sorts a block of its own.
  const auto warps = std::bit_ceil(std::max(2u, static_cast<unsigned>((plan.part_tokens - 1) / kWarpTokens + 1)));
  plan.parts = static_cast<int>((vocab + plan.part_tokens - 1) / plan.part_tokens);
  // A sixteenth of a small vocabulary, so that it runs the same code as a large one; 2048 numbers are sorted in 66
  // steps, one comparison per thread each.
  plan.candidates = static_cast<int>(std::bit_ceil(static_cast<uint64_t>(std::clamp<int64_t>(vocab / 16, 32, 2048))));
  plan.part_candidates = plan.parts > 0 ? plan.candidates / plan.parts : 0;
  plan.pitch = (vocab + 3) / 4 * 4;
  plan.scratch_bytes = modified ? rows * plan.pitch * static_cast<int64_t>(sizeof(float)) : 0;
  const auto part_bytes = static_cast<int64_t>(sizeof(SamplePart) + plan.part_candidates * sizeof(uint64_t));
  plan.parts_bytes = plan.parts > 1 ? rows * plan.parts * part_bytes : 0;
  plan.launch = {
      .grid = rows,
      .block = 32 * warps,
      .shared_bytes = plan.candidates * sizeof(uint64_t) + 2 * kSampleExchange * sizeof(double) + 16,
      .grid_y = static_cast<unsigned>(plan.parts),
      .dependent = true,
  };
  return plan;
}

}  // namespace fastinfer::cuda
