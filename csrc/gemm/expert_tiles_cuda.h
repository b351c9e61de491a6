// The tiles of tokens of a matrix product with a stack of experts. How many rows an expert has is known on the GPU
// alone, so every warp counts the tiles before it needs them.
#pragma once

#include "common/cuda/reduce.h"
#include "gemm/gemm.h"

namespace fastinfer::cuda {

// Rows begin .. end - 1 in the order of row_ids, all of one expert; a tile may have fewer rows than the kernel's.
struct ExpertTile {
  int expert, begin, end;
};

// Tiles are numbered expert by expert. A lane knows how many come before its run of experts, of which there are 32.
// Whole warps construct it and look tiles up.
class ExpertTiles {
 public:
  __device__ explicit ExpertTiles(const GemmParams& p) {
    const int first = first_expert(p, threadIdx.x % kWarpSize);
    int own = 0;
    for (int i = 0; i < run(p) && first + i < p.expert_rows.experts; ++i) own += tiles_of(p, first + i);
    int behind = own;
    for (int offset = 1; offset < kWarpSize; offset *= 2) {
      const int other = __shfl_up_sync(kFullMask, behind, offset);
      if (static_cast<int>(threadIdx.x % kWarpSize) >= offset) behind += other;
    }
    before_ = behind - own;
    count_ = __shfl_sync(kFullMask, behind, kWarpSize - 1);
  }

  __device__ int count() const {
    return count_;
  }

  __device__ ExpertTile find(const GemmParams& p, int tile) const {
    const int lane = kWarpSize - 1 - __clz(__ballot_sync(kFullMask, before_ <= tile));
    int rest = tile - __shfl_sync(kFullMask, before_, lane);
    int expert = min(first_expert(p, lane), p.expert_rows.experts - 1);  // past the last where there are no tiles
    for (int tiles; expert + 1 < p.expert_rows.experts && rest >= (tiles = tiles_of(p, expert)); ++expert)
      rest -= tiles;
    const int begin = p.expert_rows.start[expert] + rest * p.plan.tile.tokens;
    return {expert, begin, min(begin + p.plan.tile.tokens, p.expert_rows.start[expert + 1])};
  }

 private:
  __device__ static int run(const GemmParams& p) {
    return (p.expert_rows.experts + kWarpSize - 1) / kWarpSize;
  }
  __device__ static int first_expert(const GemmParams& p, int lane) {
    return lane * run(p);
  }
  __device__ static int tiles_of(const GemmParams& p, int expert) {
    const int rows = p.expert_rows.start[expert + 1] - p.expert_rows.start[expert];
    return (rows + p.plan.tile.tokens - 1) / p.plan.tile.tokens;
  }

  int before_, count_;
};

// In the place of both where one weight is for all rows.
struct NoExpertTiles {
  __device__ explicit NoExpertTiles(const GemmParams& /*p*/) {}
  __device__ int count() const {
    return 0;
  }
  __device__ ExpertTile find(const GemmParams& /*p*/, int /*tile*/) const {
    return {};
  }
};

}  // namespace fastinfer::cuda
