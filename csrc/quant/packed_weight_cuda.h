// The common part of the packed weight formats on a GPU: the copy of blocks to shared memory, and a lane's place in a
// block.
#pragma once

#include "common/cuda/ptx.h"
#include "common/cuda/reduce.h"
#include "gemm/dense_weight_cuda.h"
#include "quant/quantized_gemm.h"

namespace fastinfer::cuda {

// The packed forms; quant/pack.h describes their bytes.
template <WeightFormat kFormat_, class Params_>
struct PackedWeight {
  using Params = Params_;
  static constexpr WeightFormat kFormat = kFormat_;
  static constexpr int kBlockBytes = kTileRows * kBlockInputs * packed_bits(kFormat) / 8;

  // The blocks of a chunk lie together, row tile by row tile.
  template <int kChunk, int kThreads>
  __device__ static void load(unsigned char* stage, const Params& p, int expert, int row_unit, int chunk) {
    constexpr int kBlocks = kChunk / kBlockInputs, kPieces = kBlocks * kBlockBytes / 16, kTiles = kThreads / kPieces;
    const int thread = opaque(threadIdx.x), tile = thread / kPieces, byte = thread % kPieces * 16;
    const int tiles = (static_cast<int>(p.n) + kTileRows - 1) / kTileRows,
              blocks = static_cast<int>(p.k) / kBlockInputs;
    const int first_tile = row_unit * kGemmRowTiles + tile, first_block = chunk * kBlocks;
    const auto* from = static_cast<const unsigned char*>(p.weight.q);
    const unsigned char* at =
        from + ((static_cast<int64_t>(expert) * tiles + first_tile) * blocks + first_block) * kBlockBytes + byte;
    const bool inside = first_block + byte / kBlockBytes < blocks;
    const int64_t step = static_cast<int64_t>(blocks) * (kTiles * kBlockBytes);
    unsigned char* to = stage + thread * 16;
    for (int i = 0; i < kGemmRowTiles; i += kTiles, at += step, to += kThreads * 16) {
      const bool valid = first_tile + i < tiles && inside;
      cp_async_streaming(to, valid ? at : from, valid);
    }
  }

  // The bytes of this lane.
  template <int kChunk>
  __device__ static const unsigned char* at(const unsigned char* stage, int row_tile, int block) {
    return stage + (row_tile * (kChunk / kBlockInputs) + block) * kBlockBytes +
           threadIdx.x % kWarpSize * (kBlockBytes / 32);
  }
};

}  // namespace fastinfer::cuda
