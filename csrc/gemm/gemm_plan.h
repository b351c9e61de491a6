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
// With wide tiles the line has only the units of the last wave, and each worker does whole units before: blocks that do
// whole units read the same weights at the same time. The division does not depend on how many tokens of a tile there
// are, and a batch-invariant one does not depend on the number of tokens at all.
//
// Units are numbered in bands of kBandTiles token tiles, and within a band row by row. So the blocks that run at the
// same time share their weight rows and their tokens in the L2 (4 row units, 10 token tiles, bands of 8):
//
//   token tile      0  1  2  3  4  5  6  7 |  8  9
//   row unit 0      0  1  2  3  4  5  6  7 | 32 33
//            1      8  9 10 11 12 13 14 15 | 34 35
//            2     16 ..                   | 36 37
//            3     24 ..                31 | 38 39
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
inline constexpr int kBandTiles = 8;
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
//   0                x                scales
//   +----------------+----------------+-----------------------+-----------------------+
//   | weight         | x              | scales                | mins                  |
//   | [128, chunk]   | [tokens,       | [8 row tiles, groups, | as the scales         |
//   | or its packed  |  chunk]        |  16 rows]             |                       |
//   | blocks         |                |                       |                       |
//   +----------------+----------------+-----------------------+-----------------------+
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
// mins have no fixed size, so they come last. Wide tiles have rows of 128 bytes without a gap, swizzled by
// GemmWideShape::swizzle.
struct GemmStage {
  int x;
  int scales;  // then mins; of each chunk_groups * kScaleBytes, fp32 at most
};

inline constexpr int kScaleBytes = kGemmRows * 4;

constexpr GemmStage gemm_stage(WeightFormat format, int tokens, int chunk) {
  const bool dense = format == WeightFormat::kDense;
  const int row_bytes = tokens > kMostExactTokens ? chunk * 2 : shared_row_bytes(chunk);
  const int x = kGemmRows * (dense ? row_bytes : chunk * packed_bits(format) / 8);
  return {.x = x, .scales = x + tokens * row_bytes};
}

// Shared memory after the pipeline: the sums of 8 tokens of every warp on their way out.
inline constexpr int kSumsStride =
    2 * split_half(kGemmRows) - 4;  // the stride of a token's sums, placed by split_place
constexpr int gemm_sums_bytes(const GemmTile& tile) {
  const int sums = tile.warps_inputs * tile.warps_tokens * 8 * kSumsStride;
  return sums * 4;
}

// Blocks that a multiprocessor's registers hold. Wide tiles have 128 sums in every thread; and packed formats, which
// hold scales besides, need up to 166 registers from 32 tokens on (within 128, ptxas spills them for sm_90a).
constexpr int gemm_resident(WeightFormat format, int tokens) {
  return tokens > (format == WeightFormat::kDense ? kMostExactTokens : 16) ? 1 : 2;
}

// Few tokens: bound by memory, so long chunks, and warps that share out the inputs. A packed weight is dequantised
// once: its warps do not divide the tokens.
constexpr GemmTile gemm_tile(WeightFormat format, int tokens) {
  if (format == WeightFormat::kDense) return {tokens, 64, 4, tokens > 32 ? 2 : 1, tokens > 32 ? 1 : 2};
  int chunk = tokens <= 32 ? 256 : 128;
  if (format == WeightFormat::kInt8) chunk = 128;
  if (format == WeightFormat::kLut && tokens == 32) chunk = 128;  // the table takes shared memory
  return {tokens, chunk, 4, 1, 2};
}

// Many tokens (gemm_wide_kernel_cuda.h): bound by the tensor cores if every warp has 64 rows by 64 tokens, which with
// mma reads shared memory least often. Warps that 128 tokens leave over share out the inputs.
constexpr GemmTile wide_tile(int tokens) {
  return {tokens, 64, 2, tokens / 64, 256 / tokens};
}

// Shared memory before the pipeline: all pairs of a look-up table's entries, 32 times (quant/lut_dequantize_cuda.h).
constexpr int gemm_table_bytes(WeightFormat format) {
  return format == WeightFormat::kLut ? 256 * 4 * 32 : 0;
}

// Shared memory of two chunks of a packed weight in 16 bits (gemm_warpgroup_products_cuda.h).
inline constexpr int kWidenedWeightBytes = 2 * kGemmRows * 64 * 2;

// Whether the GPU has the products of a warpgroup: Hopper alone.
constexpr bool multiplies_by_warpgroups(const Device& device) {
  return device.arch == 90;
}

// Shared memory of a block beside the pipeline. Wide sums leave through a stage.
constexpr int gemm_fixed_bytes(WeightFormat format, int tokens, const Device& device) {
  const bool widens = format != WeightFormat::kDense && multiplies_by_warpgroups(device);
  const int others = tokens <= kMostExactTokens ? gemm_sums_bytes(gemm_tile(format, tokens))
                     : widens                   ? kWidenedWeightBytes
                                                : 0;
  return gemm_table_bytes(format) + others;
}

inline constexpr int kMostStages = 6, kMostWideStages = 4;

// Stages of each of `resident` blocks on a multiprocessor. The system takes 1 KB of shared memory for each block.
constexpr int gemm_stages(WeightFormat format, int tokens, int stage_bytes, const Device& device, int resident) {
  const int block_bytes = (static_cast<int>(device.shared_bytes) + 1024) / resident - 1024;
  const int most = tokens > kMostExactTokens ? kMostWideStages : kMostStages;
  return std::min(most, (block_bytes - gemm_fixed_bytes(format, tokens, device)) / stage_bytes);
}

struct GemmPlan {
  GemmTile tile{};
  int stages = 0;
  int chunk_groups = 0;  // groups of scales that a stage holds
  int stage_bytes = 0;
  int row_units = 0;
  int token_tiles = 0;
  int units = 0;          // row_units * token_tiles
  int chunks = 0;         // per unit
  int whole_units = 0;    // that are not cut: a worker's next one is `workers` further on
  int worker_chunks = 0;  // per worker, of the other units; 0 if there are none
  int workers = 0;
  int slot_floats = 0;  // size of a cut unit's partial sums; each worker has two slots
  size_t workspace_bytes = 0;
  LaunchConfig launch{};
};

// 256 tokens read less from the L2 for each product, but need three stages (of dense weights, 144 KB).
constexpr bool has_widest_tile(const Device& device) {
  return device.shared_bytes >= 3 * gemm_stage(WeightFormat::kDense, 256, 64).scales;
}

// The widest tile is for units enough to occupy nine of ten multiprocessors, or for any number of them where a packed
// weight is widened: that takes about as long for 128 tokens as for 256.
constexpr int gemm_tokens(WeightFormat format, int64_t m, int64_t row_units, const Device& device) {
  if (m <= 64) return m <= 8 ? 8 : m <= 16 ? 16 : m <= 32 ? 32 : 64;
  const bool widens = format != WeightFormat::kDense && multiplies_by_warpgroups(device);
  const bool enough = widens || row_units * ((m + 255) / 256) * 10 >= int64_t{device.multiprocessors} * 9;
  return m > 128 && enough && has_widest_tile(device) ? 256 : 128;
}

// Chunks of a wide unit that a worker must save for cutting to be faster: an exchange of sums takes as long as some 14.
// Where no unit is whole, blocks with different tokens also read the same weights at different times, and dense ones
// mostly from memory.
constexpr int least_saved_chunks(WeightFormat format, int64_t token_tiles, int64_t whole_units) {
  return format == WeightFormat::kDense && token_tiles > 1 && whole_units == 0 ? 40 : 14;
}

// How many rows an expert gets is known on the GPU alone: the tile is chosen for an even share, and the kernel counts
// the tiles that there are (gemm/expert_tiles_cuda.h). One kernel for few, one for some, two for many.
constexpr int grouped_tokens(int64_t m, int64_t experts, const Device& device) {
  const int64_t share = (m + experts - 1) / experts;
  return share <= 8 ? 8 : share <= 32 ? 32 : share > 256 && has_widest_tile(device) ? 256 : 128;
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
  const auto up = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const int tokens = batch_invariant ? kInvariantTokens
                     : experts > 0   ? grouped_tokens(m, experts, device)
                                     : gemm_tokens(format, m, up(n, kGemmRows), device);
  const bool wide = tokens > kMostExactTokens;
  GemmPlan plan;
  plan.tile = wide ? wide_tile(tokens) : gemm_tile(format, tokens);
  const GemmTile& tile = plan.tile;
  if (format != WeightFormat::kDense) {  // a chunk that starts within a group touches one more
    const int64_t group_blocks = group / kGemmBlockInputs, others = tile.blocks() - 1;
    const bool aligned = tile.blocks() % group_blocks == 0 || group_blocks % tile.blocks() == 0;
    const int64_t touched = aligned ? others / group_blocks + 1 : (others + group_blocks - 1) / group_blocks + 1;
    plan.chunk_groups = static_cast<int>(touched);
  }
  const int scales = format == WeightFormat::kLut ? 1 : 2;  // a look-up table has no mins
  plan.stage_bytes = gemm_stage(format, tokens, tile.chunk).scales + scales * plan.chunk_groups * kScaleBytes;
  if (wide) plan.stage_bytes = static_cast<int>(up(plan.stage_bytes, 1024)) * 1024;  // swizzled squares are aligned
  plan.token_tiles = static_cast<int>(experts > 0 ? most_expert_tiles(m, experts, tokens) : up(m, tokens));
  plan.row_units = static_cast<int>(up(n, kGemmRows));
  plan.units = plan.row_units * plan.token_tiles;
  plan.chunks = static_cast<int>(up(k, tile.chunk));
  const int64_t units = plan.units, total = units * plan.chunks;
  const bool uncut = batch_invariant || experts > 0;

  // Two blocks share a multiprocessor where both have three stages, unless it then has to do more of the work.
  const auto stages = [&](int resident) { return gemm_stages(format, tokens, plan.stage_bytes, device, resident); };
  const auto rounds = [&](int resident) {
    return up(uncut ? units : total, int64_t{device.multiprocessors} * resident) * resident;
  };
  const bool two = gemm_resident(format, tokens) == 2 && stages(2) >= 3 && rounds(2) <= rounds(1);
  const int resident = two ? 2 : 1;
  plan.stages = stages(resident);
  const auto shared = static_cast<size_t>(plan.stages * plan.stage_bytes + gemm_fixed_bytes(format, tokens, device));
  plan.launch = {.grid = 0, .block = tile.threads(), .shared_bytes = shared, .dependent = true};
  if (plan.units == 0 || plan.chunks == 0) return plan;

  const int64_t slots = int64_t{device.multiprocessors} * resident;
  const int64_t whole_units = wide ? units / slots * slots : 0, line = (units - whole_units) * plan.chunks;
  // Cutting a unit costs a round of its sums through the L2, which grows with the tile and the number of pieces.
  const int64_t most_pieces = tokens <= 16 ? 16 : tokens <= 64 ? 8 : 4;
  const int64_t least_chunks = tile.chunk >= 256 ? 1 : 2;
  const int64_t worker_chunks = std::max({up(line, slots), up(plan.chunks, most_pieces), least_chunks});
  const bool cuts = wide ? plan.chunks - worker_chunks > least_saved_chunks(format, plan.token_tiles, whole_units)
                         : units * 10 < up(units, slots) * slots * 9;
  if (uncut || line == 0 || !cuts) {
    plan.whole_units = plan.units;
    plan.workers = static_cast<int>(std::min(units, slots));
  } else {
    plan.whole_units = static_cast<int>(whole_units);
    plan.worker_chunks = static_cast<int>(worker_chunks);
    plan.workers = static_cast<int>(whole_units > 0 ? slots : up(line, worker_chunks));
    plan.slot_floats = tokens * kGemmRows * tile.warps_inputs;
    plan.workspace_bytes = static_cast<size_t>(int64_t{2} * plan.workers * plan.slot_floats) * 4;
  }
  plan.launch.grid = plan.workers;
  return plan;
}

}  // namespace fastinfer::cuda
