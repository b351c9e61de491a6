// The copies of the GPU's matrix product for more than 64 tokens (gemm/gemm_wide_kernel_cuda.h): from the weight, its
// scales and the tokens to the stages of the pipeline.
#pragma once

#include "common/cuda/ptx.h"
#include "common/cuda/wgmma.h"
#include "gemm/dense_weight_cuda.h"
#include "gemm/gemm_position_cuda.h"

namespace fastinfer::cuda {

// Sizes of a wide tile and its stages.
template <WeightFormat kFormat, int kTokens>
struct GemmWideShape {
  static constexpr bool kDense = kFormat == WeightFormat::kDense;
  static constexpr int kPackedBits = packed_bits(kFormat);
  static constexpr int kBlockBytes = kTileRows * kBlockInputs * kPackedBits / 8;  // of a packed weight
  static constexpr GemmTile kTile = wide_tile(kTokens);
  static constexpr int kThreads = kTile.threads(), kChunk = kTile.chunk, kBlocks = kTile.blocks();
  static constexpr int kRowBytes = kChunk * 2;  // of tokens and dense weights
  static constexpr GemmStage kStage = gemm_stage(kFormat, kTokens, kChunk);
  static_assert(kRowBytes == 128 && kThreads / kWarpSize == kGemmRowTiles);

  // A byte's place in such a row is its offset, exclusive or this. Dense weights and their tokens are read by ldmatrix,
  // and all by wgmma.
  __device__ static constexpr int swizzle(int row) {
    return kDense || kHasWgmma ? matrix_swizzle(kRowBytes, row) : pair_swizzle(row);
  }
};

// Copies a worker's chunks, one after another. Each thread copies pieces of 16 bytes.
template <class Weight, class T, int kTokens, bool kGrouped>
class GemmWideCopy {
  using Params = typename Weight::Params;
  using Position = GemmPosition<kGrouped, true>;
  using Shape = GemmWideShape<Weight::kFormat, kTokens>;
  static constexpr bool kDense = Shape::kDense;
  static constexpr int kThreads = Shape::kThreads, kChunk = Shape::kChunk, kBlocks = Shape::kBlocks;
  static constexpr int kRowBytes = Shape::kRowBytes, kPieces = kRowBytes / 16;
  static constexpr int kRowStep = kThreads / kPieces;  // rows that a copy by all threads takes
  static constexpr GemmStage kStage = Shape::kStage;

 public:
  __device__ GemmWideCopy(const Params& params, const TokenTiles<kGrouped>& token_tiles)
      : p(params), tiles(token_tiles), ahead(params, token_tiles) {
    begin_unit();
  }

  // Where the next chunk is.
  __device__ const Position& position() const {
    return ahead;
  }

  // What is not there becomes zeros; its address is not read and may be anything.
  __device__ void copy(unsigned char* stage) {
    const unsigned thread = opaque(threadIdx.x), row = thread / kPieces, piece = thread % kPieces;
    const unsigned first_input = ahead.chunk * kChunk, inputs = static_cast<unsigned>(p.k);
    const bool inside = first_input + piece * 8 < inputs;
    const unsigned place = row * kRowBytes + (piece * 16 ^ Shape::swizzle(row));
    if constexpr (kDense) {
      const int rows = inside ? weight_rows : 0;
      const unsigned char* from = weight_from;
#pragma unroll
      for (int i = 0; i < kGemmRows; i += kRowStep, from += kRowStep * 2 * p.k) {
        cp_async(stage + place + i * kRowBytes, from, i < rows);
      }
    } else {
      const unsigned block = thread % kTilePieces / (kBlockBytes / 16);
      const int tiles = first_input + block * kBlockInputs < inputs ? weight_rows : 0;
#pragma unroll
      for (int i = 0; i < kGemmRowTiles; i += kTileStep) {
        cp_async(stage + thread * 16 + i * kBlocks * kBlockBytes,
                 weight_from + static_cast<int64_t>(i) * (inputs / kBlockInputs) * kBlockBytes, i < tiles);
      }
      copy_scales(stage + kStage.scales);
    }
    const int rows = inside ? x_rows : 0;
    unsigned char* const to = stage + kStage.x + place;
    const T* from = x_from;
#pragma unroll
    for (int i = 0; i < kTokens; i += kRowStep, from += kRowStep * p.x_stride) {
      cp_async(to + i * kRowBytes, kGrouped ? x_from + uint64_t{x_row[i / kRowStep]} * 8 : from, i < rows);
    }
    if (ahead.advance(p, tiles)) {
      begin_unit();
    } else {
      x_from += kChunk;
      weight_from += kDense ? kRowBytes : kBlocks * kBlockBytes;
    }
  }

 private:
  const Params& p;
  const TokenTiles<kGrouped>& tiles;
  Position ahead;
  const unsigned char* weight_from;
  const T* x_from;
  int weight_rows, x_rows;  // rows (packed: row tiles) that exist, from this thread's first on
  uint32_t x_row[kGrouped ? kTokens / kRowStep : 1];  // in pieces of 16 bytes from x_from on
  const unsigned char* scales_from;                   // the lane's piece of the warp's row tile
  int scale_pieces_left;                              // of its scales from there on

  // A packed chunk: each row tile's blocks lie together.
  static constexpr int kBlockBytes = Shape::kBlockBytes;
  static constexpr int kTilePieces = kBlocks * kBlockBytes / 16, kTileStep = kThreads / kTilePieces;

  __device__ int row_tiles() const {
    return (static_cast<int>(p.n) + kTileRows - 1) / kTileRows;
  }
  __device__ int scale_pieces() const
    requires(!kDense)
  {
    return p.weight.scale_dtype == DType::kFloat16 ? 2 : 4;  // 16 scales are so many pieces
  }

  __device__ void begin_unit() {
    const int thread = opaque(threadIdx.x), row = thread / kPieces, input = ahead.chunk * kChunk + thread % kPieces * 8;
    const int expert = ahead.expert_tile.expert, first_token = ahead.first_token(p) + row;
    x_rows = ahead.end_token(p) - first_token;
    x_from = static_cast<const T*>(p.x) + input;
    if constexpr (kGrouped) {
#pragma unroll
      for (int i = 0; i < kTokens / kRowStep; ++i) {
        const int64_t x_row_index = i * kRowStep < x_rows ? p.expert_rows.x_row(first_token + i * kRowStep) : 0;
        x_row[i] = static_cast<uint32_t>(x_row_index * (p.x_stride / 8));
      }
    } else {
      x_from += first_token * p.x_stride;
    }
    if constexpr (kDense) {
      const int first_row = ahead.row_unit * kGemmRows + row;
      weight_rows = static_cast<int>(p.n) - first_row;
      weight_from = static_cast<const unsigned char*>(p.weight) + ((expert * p.n + first_row) * p.k + input) * 2;
    } else {
      const int64_t first_tile = int64_t{expert} * row_tiles();
      const int tile = ahead.row_unit * kGemmRowTiles + thread / kTilePieces,
                blocks = static_cast<int>(p.k) / kBlockInputs;
      weight_rows = row_tiles() - tile;
      weight_from = static_cast<const unsigned char*>(p.weight.q) +
                    ((first_tile + tile) * blocks + ahead.chunk * kBlocks) * kBlockBytes + thread % kTilePieces * 16;
      const int scale_tile = ahead.row_unit * kGemmRowTiles + thread / kWarpSize, lane = thread % kWarpSize;
      const int pieces = p.weight.groups * scale_pieces();
      scales_from =
          static_cast<const unsigned char*>(p.weight.scales) + ((first_tile + scale_tile) * pieces + lane) * 16;
      scale_pieces_left = scale_tile < row_tiles() ? pieces - lane : 0;
    }
  }

  // The scales and mins of the chunk's groups: a run of memory for each row tile, which a warp copies.
  __device__ void copy_scales(unsigned char* to) const
    requires(!kDense)
  {
    const int pieces = p.plan.chunk_groups * scale_pieces(), lane = threadIdx.x % kWarpSize;
    if (lane >= pieces) return;
    const int first = p.weight.group_of(ahead.chunk * kBlocks) * scale_pieces();
    const bool valid = first < scale_pieces_left;
    const unsigned char* const from = scales_from + int64_t{first} * 16;
    to += (static_cast<int>(threadIdx.x) / kWarpSize * pieces + lane) * 16;
    cp_async(to, from, valid);
    if (p.weight.mins != nullptr) {
      const auto distance =
          static_cast<const unsigned char*>(p.weight.mins) - static_cast<const unsigned char*>(p.weight.scales);
      cp_async(to + p.plan.chunk_groups * kScaleBytes, from + distance, valid);
    }
  }
};

}  // namespace fastinfer::cuda
