// How the integer product is cut up for a GPU. Plain data.
//
// A block multiplies 128 weight rows by one tile of tokens, in chunks of inputs. Where such units are too few to fill
// the GPU, several blocks share a unit's inputs; the last to finish adds their int32 sums, which is exact in any order.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "common/launch_config.h"
#include "common/shared_layout.h"

namespace fastinfer::cuda {

inline constexpr int kW8a8Rows = 128, kW8a8Threads = 256, kW8a8BandTiles = 8;
inline constexpr int kW8a8SumsStride =
    2 * split_half(kW8a8Rows) - 4;  // the stride of a token's sums, placed by split_place

// The parameters that are fixed when a kernel is compiled.
struct W8a8Tile {
  int tokens;
  int chunk;  // inputs of a pipeline stage
  int stages;
  int resident;  // blocks that a multiprocessor's registers hold

  // Whether wgmma multiplies, where there is one. It reads rows of 128 bytes; with fewer tokens mma does not bind.
  constexpr bool warpgroups() const {
    return tokens >= 64 && chunk == 128;
  }
  constexpr int stage_bytes() const {
    return (kW8a8Rows + tokens) * chunk;
  }
  // The sums leave through the same memory.
  constexpr int shared_bytes() const {
    return std::max(stages * stage_bytes(), tokens * kW8a8SumsStride * 4);
  }
};

// The widest tile reads a quarter fewer bytes for each product than the one before it, but needs 192 KB: sm_90 has that
// much. The others, 66 to 80 KB, are within the 99 KB of every GPU from sm_80 on, and twice within sm_80's and sm_90's.
inline constexpr int kWidestW8a8Tokens = 256;

constexpr W8a8Tile w8a8_tile(int tokens) {
  if (tokens == kWidestW8a8Tokens) return {tokens, 128, 4, 1};
  return {tokens, tokens == 128 ? 64 : 128, tokens == 64 ? 3 : 4, 2};
}

// `batch_invariant`: one tile for any number of tokens. (Sums are exact, however they are cut; the compiler alone
// would keep the rounding of the scales equal in several.)
constexpr int w8a8_tile_tokens(int64_t m, int64_t row_units, const Device& device, bool batch_invariant) {
  if (batch_invariant) return 32;
  for (const int tokens : {8, 16, 32, 64, 128}) {
    if (m <= tokens) return tokens;
  }
  const auto widest = static_cast<size_t>(w8a8_tile(kWidestW8a8Tokens).shared_bytes());
  // With fewer units than a third of the multiprocessors, adding up pieces of them costs what the tile saves.
  const int64_t units = row_units * ((m + kWidestW8a8Tokens - 1) / kWidestW8a8Tokens);
  return widest <= device.shared_bytes && units * 3 >= device.multiprocessors ? kWidestW8a8Tokens : 128;
}

struct W8a8GemmPlan {
  W8a8Tile tile{};
  int token_tiles = 0;
  int units = 0;
  int chunks = 0;        // per unit
  int split_chunks = 0;  // per block
  int splits = 0;
  size_t workspace_ints = 0;  // sums of [units, splits, tokens, 128] where units are split
  LaunchConfig launch{};      // [units, splits]
};

inline W8a8GemmPlan plan_w8a8_gemm(int64_t m, int64_t n, int64_t k, const Device& device,
                                   bool batch_invariant = false) {
  const auto up = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const int tokens = w8a8_tile_tokens(m, up(n, kW8a8Rows), device, batch_invariant);
  W8a8GemmPlan plan;
  plan.tile = w8a8_tile(tokens);
  plan.token_tiles = static_cast<int>(up(m, tokens));
  plan.units = static_cast<int>(up(n, kW8a8Rows)) * plan.token_tiles;
  plan.chunks = static_cast<int>(up(k, plan.tile.chunk));
  if (plan.units == 0 || plan.chunks == 0) return plan;
  // Every piece costs a round of its sums through the L2, which grows with the tile; of shared memory 1 KB a block is
  // the system's.
  const int64_t most_splits = tokens <= 16 ? 16 : tokens <= 64 ? 8 : 4, least_chunks = 2;
  const int64_t shared = plan.tile.shared_bytes();
  const int64_t fitting = (static_cast<int64_t>(device.shared_bytes) + 1024) / (shared + 1024);
  const int64_t resident = std::clamp<int64_t>(fitting, 1, plan.tile.resident);
  const int64_t wanted = std::clamp<int64_t>(device.multiprocessors * resident / plan.units, 1, most_splits);
  plan.split_chunks = static_cast<int>(std::min<int64_t>(std::max(up(plan.chunks, wanted), least_chunks), plan.chunks));
  plan.splits = static_cast<int>(up(plan.chunks, plan.split_chunks));
  if (plan.splits > 1) plan.workspace_ints = static_cast<size_t>(plan.units) * plan.splits * tokens * kW8a8Rows;
  plan.launch = {.grid = plan.units,
                 .block = kW8a8Threads,
                 .shared_bytes = static_cast<size_t>(shared),
                 .grid_y = static_cast<unsigned>(plan.splits),
                 .dependent = true};
  return plan;
}

}  // namespace fastinfer::cuda
