// Which rows and tokens a block of the GPU's integer product computes.
#pragma once

#include "common/cuda/ptx.h"
#include "quant/w8a8_gemm.h"

namespace fastinfer::cuda {

// Units are numbered in bands of kW8a8BandTiles token tiles, and within a band row by row, so that blocks that run at
// the same time share their rows and their tokens in the L2 (gemm/gemm_plan.h has a picture).
struct W8a8Unit {
  int row_unit, token_tile;

  __device__ explicit W8a8Unit(const W8a8GemmParams& p) {
    const int token_tiles = p.w8a8_plan.token_tiles;
    const int unit = static_cast<int>(opaque(blockIdx.x)),
              band_units = p.w8a8_plan.units / token_tiles * kW8a8BandTiles;
    const int first_tile = unit / band_units * kW8a8BandTiles, width = min(kW8a8BandTiles, token_tiles - first_tile);
    row_unit = unit % band_units / width;
    token_tile = first_tile + unit % band_units % width;
  }

  __device__ int64_t first_row() const {
    return int64_t{row_unit} * kW8a8Rows;
  }
  __device__ int64_t first_token(const W8a8GemmParams& p) const {
    return int64_t{token_tile} * p.w8a8_plan.tile.tokens;
  }
};

}  // namespace fastinfer::cuda
