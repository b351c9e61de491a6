// The copies of the GPU's integer product (quant/w8a8_gemm.cu): from the weight and the tokens to the stages of the
// pipeline, chunk by chunk. Each thread copies pieces of 16 bytes, whose places differ by fixed steps.
#pragma once

#include "common/cuda/ptx.h"
#include "quant/w8a8_gemm_unit_cuda.h"

namespace fastinfer::cuda {

// Sizes of a tile and its stages: [row tile, block, 512 bytes] of the weight, then [token, chunk], swizzled.
template <int kTokens>
struct W8a8Shape {
  static constexpr W8a8Tile kTile = w8a8_tile(kTokens);
  static constexpr int kBlockBytes = kTileRows * kBlockInputs;
  static constexpr int kBlocks = kTile.chunk / kBlockInputs;
  static constexpr int kStageBytes = kTile.stage_bytes();
  static constexpr bool kWarpgroups = kTile.warpgroups();
  static constexpr int kX = kW8a8Rows * kTile.chunk;  // the tokens' offset in a stage
};

template <int kTokens>
class W8a8Copy {
  using Shape = W8a8Shape<kTokens>;
  static constexpr int kChunk = Shape::kTile.chunk;
  static constexpr int kTilePieces = Shape::kBlocks * Shape::kBlockBytes / 16;  // of a row tile
  static constexpr int kTileStep = kW8a8Threads / kTilePieces;  // row tiles that a copy by all threads takes
  static constexpr int kRowPieces = kChunk / 16, kRowStep = kW8a8Threads / kRowPieces;

 public:
  // From chunk `first` on.
  __device__ W8a8Copy(const W8a8GemmParams& params, int first) : p(params) {
    const W8a8Unit unit(p);
    const int thread = threadIdx.x, blocks = static_cast<int>(p.k) / kBlockInputs;
    const int64_t tile = unit.row_unit * (kW8a8Rows / kTileRows) + thread / kTilePieces;
    const int first_block = first * Shape::kBlocks;
    weight_tiles = static_cast<int>((p.n + kTileRows - 1) / kTileRows - tile);
    weight_blocks = blocks - first_block - thread % kTilePieces / (Shape::kBlockBytes / 16);
    weight_from = static_cast<const unsigned char*>(p.weight.q) + (tile * blocks + first_block) * Shape::kBlockBytes +
                  thread % kTilePieces * 16;
    const int row = thread / kRowPieces, input = first * kChunk + thread % kRowPieces * 16;
    const int64_t token = unit.first_token(p) + row;
    x_tokens = static_cast<int>(min(p.m - token, int64_t{kTokens} - row));
    x_inputs = static_cast<int>(p.k) - input;
    x_from = static_cast<const unsigned char*>(p.x) + token * p.k + input;
  }

  // The next chunk of the weight; zeros past its end, of which no address is read.
  __device__ void weight(unsigned char* stage) {
    const int tiles = weight_blocks > 0 ? weight_tiles : 0;
    const int64_t step = kTileStep * p.k * kTileRows;
    const unsigned char* from = weight_from;
#pragma unroll
    for (int i = 0; i < kW8a8Rows / kTileRows; i += kTileStep, from += step) {
      cp_async(stage + threadIdx.x * 16 + i * kTilePieces * 16, from, i < tiles);
    }
    weight_blocks -= Shape::kBlocks;
    weight_from += Shape::kBlocks * Shape::kBlockBytes;
  }

  // The next chunk of the tokens; zeros past the last token and the last input.
  __device__ void x(unsigned char* stage) {
    const int tokens = x_inputs > 0 ? x_tokens : 0;
    const int thread = static_cast<int>(opaque(threadIdx.x)), row = thread / kRowPieces;  // recomputed: registers
    unsigned char* const to =
        stage + Shape::kX + row * kChunk + (thread % kRowPieces * 16 ^ matrix_swizzle(kChunk, row));
    const int64_t step = kRowStep * p.k;
    const unsigned char* from = x_from;
#pragma unroll
    for (int i = 0; i < kTokens; i += kRowStep, from += step) {
      if (kTokens % kRowStep == 0 || i + row < kTokens) {
        cp_async(to + i * kChunk, from, i < tokens);
      }
    }
    x_inputs -= kChunk;
    x_from += kChunk;
  }

 private:
  const W8a8GemmParams& p;
  // What exists of this thread's next chunk, from its first piece on.
  int weight_tiles, weight_blocks, x_tokens, x_inputs;
  const unsigned char *weight_from, *x_from;
  static_assert(matrix_swizzle(kChunk, kRowStep) == 0);
};

}  // namespace fastinfer::cuda
