// Which unit and chunk of a matrix product a block is at. gemm/gemm_plan.h shows how the work is split.
#pragma once

#include <type_traits>

#include "common/cuda/reduce.h"
#include "gemm/expert_tiles_cuda.h"
#include "gemm/gemm.h"

namespace fastinfer::cuda {

// The tiles of tokens. With a stack of experts every warp counts them.
template <bool kGrouped>
using TokenTiles = std::conditional_t<kGrouped, ExpertTiles, NoExpertTiles>;

// The unit and chunk that a worker is at. Whole warps construct and move it. kWide: units may be cut after whole ones.
template <bool kGrouped, bool kWide = false>
struct GemmPosition {
  using Tiles = TokenTiles<kGrouped>;
  int unit, chunk, row_unit, token_tile;
  ExpertTile expert_tile{};

  __device__ GemmPosition(const GemmParams& p, const Tiles& tiles) : unit(blockIdx.x), chunk(0) {
    if (!kGrouped && unit >= p.plan.whole_units) enter_line(p);
    locate(p, tiles);
  }

  // The beginning of a unit.
  __device__ GemmPosition(const GemmParams& p, const Tiles& tiles, int unit) : unit(unit), chunk(0) {
    locate(p, tiles);
  }

  // Returns true if this leads to another unit.
  __device__ bool advance(const GemmParams& p, const Tiles& tiles) {
    if (++chunk < p.plan.chunks) return false;
    next_unit(p, tiles);
    return true;
  }

  __device__ void next_unit(const GemmParams& p, const Tiles& tiles) {
    chunk = 0;
    const bool whole = kGrouped || unit < p.plan.whole_units;
    unit += whole ? p.plan.workers : 1;
    if (kWide && !kGrouped && whole && unit >= p.plan.whole_units && p.plan.worker_chunks > 0) enter_line(p);
    locate(p, tiles);
  }

  __device__ int first_token(const GemmParams& p) const {
    return kGrouped ? expert_tile.begin : token_tile * p.plan.tile.tokens;
  }
  __device__ int end_token(const GemmParams& p) const {
    return kGrouped ? expert_tile.end : static_cast<int>(p.m);
  }

 private:
  // To where the worker begins in the line of units that are cut.
  __device__ void enter_line(const GemmParams& p) {
    const int first = blockIdx.x * p.plan.worker_chunks;
    unit = p.plan.whole_units + first / p.plan.chunks;
    chunk = first % p.plan.chunks;
  }

  __device__ void locate(const GemmParams& p, const Tiles& tiles) {
    const int token_tiles = kGrouped ? max(tiles.count(), 1) : p.plan.token_tiles;
    const int band = unit / (p.plan.row_units * kBandTiles), place = unit - band * (p.plan.row_units * kBandTiles);
    const int first_tile = band * kBandTiles;
    const int width = max(1, min(kBandTiles, token_tiles - first_tile));  // past the last unit all is valid, but unused
    row_unit = place / width;
    token_tile = min(first_tile + place - row_unit * width, token_tiles - 1);
    expert_tile = tiles.find(p, token_tile);
  }
};

// Chunks of this worker.
template <bool kGrouped>
__device__ int worker_chunks(const GemmParams& p, const TokenTiles<kGrouped>& tiles) {
  const GemmPlan& plan = p.plan;
  const int worker = blockIdx.x;
  if constexpr (kGrouped) {
    const int units = plan.row_units * tiles.count();  // the plan's are the most there can be
    return worker < units ? ((units - worker - 1) / plan.workers + 1) * plan.chunks : 0;
  }
  const int whole = worker < plan.whole_units ? (plan.whole_units - worker - 1) / plan.workers + 1 : 0;
  const int line = (plan.units - plan.whole_units) * plan.chunks - worker * plan.worker_chunks;
  return whole * plan.chunks + max(min(plan.worker_chunks, line), 0);
}

}  // namespace fastinfer::cuda
