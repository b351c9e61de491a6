// How a matrix product is split for a GPU: tiles, pipeline, and the division of the work between blocks. Plain data.
//
// A unit of work is 128 weight rows by one tile of tokens. It is summed in chunks of inputs. Blocks are workers that
// stay resident. Where the units fill the GPU in whole waves, worker w does units w, w + workers, ... Where they do
// not, the chunks of all units form one line and every worker takes an equal part of it (stream-K), so that no
// multiprocessor idles:
//
//   unit            0               1               2        (5 chunks each, 4 workers, 4 chunks for each worker)
//   chunk     0 1 2 3 4 | 0 1 2 3 4 | 0 1 2 3 4
//   worker    0 0 0 0 1 | 1 1 1 2 2 | 2 2 3 3 3
//
// Here all three units are cut. The worker that finishes a unit last adds up its pieces, in the order of the workers.
// The division does not depend on how many tokens of a tile there are, and a batch-invariant one does not depend on the
// number of tokens at all.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/dtype.h"
#include "common/launch_config.h"
#include "common/shared_layout.h"

namespace fastinfer::cuda {

enum class WeightFormat { kDense, kInt8, kInt4, kLut };

inline constexpr int kGemmRows = 128;        // weight rows of a unit
inline constexpr int kGemmBlockInputs = 32;  // inputs that a warp takes at a time; groups are multiples of it
inline constexpr int kMostExactTokens = 64;  // tiles up to here scale the fp32 sums, wider ones the 16-bit weights
inline constexpr int kMostNormTokens = 16;   // tiles up to here normalise on the fly, wider ones in a kernel before
inline constexpr int kInvariantTokens = 32;  // the tile for any number of tokens where results must not depend on it

constexpr int packed_bits(WeightFormat format) {
  return format == WeightFormat::kInt8 ? 8 : 4;
}

// The parameters that are fixed when a kernel is compiled. Warps divide a tile's rows, its tokens, and the chunk's
// blocks of inputs.
struct GemmTile {
  int tokens;
  int chunk;  // inputs of a pipeline stage
  int warps_rows;
  int warps_tokens;
  int warps_inputs;
  int stages;

  constexpr int warps() const {
    return warps_rows * warps_tokens * warps_inputs;
  }
  constexpr unsigned threads() const {
    return 32u * static_cast<unsigned>(warps());
  }
  constexpr int blocks() const {
    return chunk / kGemmBlockInputs;
  }
};

// A stage of the pipeline is a chunk of inputs in shared memory. GemmStage has the offsets of its parts, in bytes:
//
//   0                x              norm             scales
//   +----------------+--------------+----------------+-----------------------+-----------------------+
//   | weight         | x            | norm weights   | scales                | mins                  |
//   | [128, chunk]   | [tokens,     | [chunk] fp32   | [8 row tiles, groups, | as the scales         |
//   | or its packed  |  chunk]      | (few tokens)   |  16 rows]             |                       |
//   | blocks         |              |                |                       |                       |
//   +----------------+--------------+----------------+-----------------------+-----------------------+
//
// Rows of 16-bit values (x and dense weights) are 32 bytes longer than the chunk (shared_row_bytes). A half warp reads
// 8 bytes by each of four lanes from each of four rows, which then lie in different banks:
//
//   byte modulo 128    0        32        64        96       128
//   row 0              |t0 .. t3|         |         |         |
//   row 1              |        |t0 .. t3 |         |         |
//   row 2              |        |         |t0 .. t3 |         |
//   row 3              |        |         |         |t0 .. t3 |
//
// A packed block needs no such gap, because its bytes are stored in the order of the lanes that read them. Scales and
// mins have no fixed size, so they come last.
struct GemmStage {
  int x;
  int norm;    // norm weights, fp32 at most
  int scales;  // then mins; of each chunk_groups * kScaleBytes, fp32 at most
};

inline constexpr int kScaleBytes = kGemmRows * 4;

constexpr GemmStage gemm_stage(WeightFormat format, int tokens, int chunk) {
  const bool dense = format == WeightFormat::kDense;
  const int x = kGemmRows * (dense ? shared_row_bytes(chunk) : chunk * packed_bits(format) / 8);
  const int norm = x + tokens * shared_row_bytes(chunk);
  return {.x = x, .norm = norm, .scales = norm + (tokens <= kMostNormTokens ? chunk * 4 : 0)};
}

// Shared memory beside the pipeline: the sums of 8 tokens of every warp on their way out, sums of squares, a flag.
inline constexpr int kSumsStride =
    2 * split_half(kGemmRows) - 4;  // the stride of a token's sums, placed by split_place
constexpr int gemm_sums_bytes(const GemmTile& tile) {
  const int sums = tile.warps_inputs * tile.warps_tokens * 8 * kSumsStride;
  return (sums + tile.warps_inputs * tile.tokens + 4) * 4;
}

// Blocks that a multiprocessor's registers hold. 128 tokens have 64 sums in every thread, which takes some 160; and
// packed formats, which hold scales besides, need up to 166 from 32 tokens on (within 128, ptxas spills them for
// sm_90a).
constexpr int gemm_resident(WeightFormat format, int tokens) {
  return tokens > (format == WeightFormat::kDense ? kMostExactTokens : 16) ? 1 : 2;
}

// Few tokens: bound by memory, so long chunks, and warps that share out the inputs. As many stages, up to four, as fit
// the 99 KB that a block may have on every GPU from sm_80 on.
constexpr GemmTile gemm_tile(WeightFormat format, int tokens) {
  const bool dense = format == WeightFormat::kDense, wide = tokens > kMostExactTokens;
  const int chunk = dense ? (wide ? 32 : 64) : (tokens <= 16 ? 128 : 64);
  GemmTile tile{tokens, chunk, 4, 1, 2, 0};
  if (tokens > 32) tile = {tokens, chunk, 4, 2, 1, 0};  // sums for half the tokens are what registers hold
  const int most_scales = dense ? 0 : 2 * tile.blocks() * kScaleBytes;
  const int stage_bytes = gemm_stage(format, tokens, chunk).scales + most_scales;
  tile.stages = std::min(4, (99 * 1024 - gemm_sums_bytes(tile)) / stage_bytes);
  return tile;
}

// Rows of an expert that make a tile of tokens. Of a list the first one's `expert` is the number of those that follow.
struct alignas(16) ExpertTile {
  int expert, begin, end;
};

struct GemmPlan {
  GemmTile tile{};
  int chunk_groups = 0;  // groups of scales that a stage holds
  int stage_bytes = 0;
  int token_tiles = 0;  // units are numbered row tile by row tile
  int units = 0;
  int chunks = 0;         // per unit
  int worker_chunks = 0;  // per worker if units are cut; 0: whole units, the next one `workers` further on
  int workers = 0;
  int slot_floats = 0;  // size of a cut unit's partial sums; each worker has two slots
  size_t workspace_bytes = 0;
  LaunchConfig launch{};
};

constexpr int gemm_tokens(int64_t m) {
  return m <= 8 ? 8 : m <= 16 ? 16 : m <= 32 ? 32 : m <= 64 ? 64 : 128;
}

// How many rows an expert gets is known on the GPU alone: the tile is chosen for an even share, and a kernel makes the
// list of the tiles that there are, in the workspace. One kernel for few, one for some, one for many.
constexpr int grouped_tokens(int64_t m, int64_t experts) {
  const int64_t share = (m + experts - 1) / experts;
  return share <= 8 ? 8 : share <= 32 ? 32 : 128;
}

// At most: every expert that has rows may have one tile that is not full.
constexpr int64_t most_expert_tiles(int64_t m, int64_t experts, int tokens) {
  const int64_t active = std::min(m, experts);
  return active + (m - active) / tokens;
}

// `experts`: 0 for one weight, else the weight is a stack of so many slices. `batch_invariant`: one kernel for any
// number of tokens, which sums each element in one order, exactly scaled, and cuts no unit.
inline GemmPlan gemm_plan(WeightFormat format, int64_t m, int64_t n, int64_t k, int64_t group, const Device& device,
                          int64_t experts = 0, bool batch_invariant = false) {
  const int tokens = batch_invariant ? kInvariantTokens : experts > 0 ? grouped_tokens(m, experts) : gemm_tokens(m);
  GemmPlan plan;
  const GemmTile tile = plan.tile = gemm_tile(format, tokens);
  if (format != WeightFormat::kDense) {  // a chunk that starts within a group touches one more
    const int64_t group_blocks = group / kGemmBlockInputs, others = tile.blocks() - 1;
    const bool aligned = tile.blocks() % group_blocks == 0 || group_blocks % tile.blocks() == 0;
    const int64_t touched = aligned ? others / group_blocks + 1 : (others + group_blocks - 1) / group_blocks + 1;
    plan.chunk_groups = static_cast<int>(touched);
  }
  plan.stage_bytes = gemm_stage(format, tokens, tile.chunk).scales + 2 * plan.chunk_groups * kScaleBytes;
  const auto shared = static_cast<size_t>(tile.stages * plan.stage_bytes + gemm_sums_bytes(tile));

  const auto up = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  plan.token_tiles = static_cast<int>(experts > 0 ? most_expert_tiles(m, experts, tokens) : up(m, tokens));
  plan.units = static_cast<int>(up(n, kGemmRows)) * plan.token_tiles;
  plan.chunks = static_cast<int>(up(k, tile.chunk));
  plan.launch = {.grid = 0, .block = tile.threads(), .shared_bytes = shared, .dependent = true};
  if (plan.units == 0 || plan.chunks == 0) return plan;

  // The system takes 1 KB of a multiprocessor's shared memory for each block.
  const int64_t resident = device.shared_bytes + 1024 >= 2 * (shared + 1024) ? gemm_resident(format, tokens) : 1;
  const int64_t slots = device.multiprocessors * resident, units = plan.units;
  const bool whole = batch_invariant || experts > 0 || units * 10 >= up(units, slots) * slots * 9;
  if (whole) {
    plan.workers = static_cast<int>(std::min(units, slots));
  } else {
    // Cutting a unit costs a round of its sums through the L2, which grows with the tile and the number of pieces.
    const int64_t most_pieces = tokens <= 16 ? 16 : tokens <= 64 ? 8 : 4, least_chunks = 2;
    const int64_t total = units * plan.chunks;
    const int64_t worker_chunks = std::max({up(total, slots), up(plan.chunks, most_pieces), least_chunks});
    plan.worker_chunks = static_cast<int>(worker_chunks);
    plan.workers = static_cast<int>(up(total, worker_chunks));
    plan.slot_floats = tokens * (kSumsStride + 1);
    plan.workspace_bytes = static_cast<size_t>(int64_t{2} * plan.workers * plan.slot_floats + units) * 4;
  }
  if (experts > 0) plan.workspace_bytes = (1 + plan.token_tiles) * sizeof(ExpertTile);
  plan.launch.grid = plan.workers;
  return plan;
}

}  // namespace fastinfer::cuda
