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

  // A thread's copies of a unit's chunks, one after another. The blocks of a row tile's chunk lie together. With
  // kClamped all chunks are whole, and row tiles past the last are copies of others.
  template <int kChunk, int kThreads, bool kClamped>
  class Copy {
    static constexpr int kBlocks = kChunk / kBlockInputs, kPieces = kBlocks * kBlockBytes / 16;
    static constexpr int kTiles = kThreads / kPieces;  // that the block copies at a time
    static_assert(kThreads % kPieces == 0 && kGemmRowTiles % kTiles == 0);

   public:
    __device__ void start(const Params& p, int expert, int row_unit, int chunk) {
      const int thread = opaque(threadIdx.x), tile = thread / kPieces, byte = thread % kPieces * 16;
      const int tiles = (static_cast<int>(p.n) + kTileRows - 1) / kTileRows;
      const int first_tile = row_unit * kGemmRowTiles + tile, first_block = chunk * kBlocks;
      const int row_blocks = static_cast<int>(p.k) / kBlockInputs;
      from = static_cast<const unsigned char*>(p.weight.q) + byte +
             ((int64_t{expert} * tiles + first_tile) * row_blocks + first_block) * kBlockBytes;
      step = int64_t{row_blocks} * (kTiles * kBlockBytes);
      tiles_left = tiles - first_tile;
      if constexpr (kClamped) {
        static_assert(kGemmRowTiles <= 2 * kTiles);
        if (tiles_left <= 0) from += (tiles_left - 1) * int64_t{row_blocks} * kBlockBytes;
        if (tiles_left <= kTiles) step = 0;
      }
      blocks_left = row_blocks - first_block - byte / kBlockBytes;
    }

    __device__ void advance() {
      from += kBlocks * kBlockBytes;
      if (!kClamped) blocks_left -= kBlocks;
    }

    // `to`: the place of this thread's first piece.
    __device__ void copy(unsigned char* to) const {
      const int there = blocks_left > 0 ? tiles_left : 0;
      const unsigned char* at = from;
#pragma unroll
      for (int i = 0; i < kGemmRowTiles; i += kTiles, at += step) {
        if (kClamped || i < there) cp_async(to + i / kTiles * kThreads * 16, at);
      }
    }

   private:
    const unsigned char* from;
    int64_t step;
    int tiles_left, blocks_left;  // from this thread's first piece on
  };

  // The place of a block in a stage.
  template <int kChunk>
  __device__ static constexpr int place(int row_tile, int block) {
    return (row_tile * (kChunk / kBlockInputs) + block) * kBlockBytes;
  }

  // The place of this lane's bytes in a block.
  template <int kChunk>
  __device__ static int lane_place() {
    return threadIdx.x % kWarpSize * (kBlockBytes / 32);
  }
};

}  // namespace fastinfer::cuda
