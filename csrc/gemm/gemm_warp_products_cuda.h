// The products of a chunk by mma (gemm/gemm_wide_kernel_cuda.h), for every weight format. Each of eight warps
// multiplies 64 rows by 64 tokens, from which mma (the weight is its M side) takes four tiles of 16 rows and eight of 8
// tokens:
//
//                  128 tokens                           256 tokens
//          0 .. 63        64 .. 127        0 .. 63   64 .. 127   128 .. 191  192 .. 255
//        +--------------+--------------+  +---------+-----------+-----------+-----------+
//   row  | warp 0 or 2  | warp 4 or 6  |  | warp 0  | warp 2    | warp 4    | warp 6    |
//    64  | warp 1 or 3  | warp 5 or 7  |  | warp 1  | warp 3    | warp 5    | warp 7    |
//        +--------------+--------------+  +---------+-----------+-----------+-----------+
//
// With 128 tokens the first of two warps takes inputs 0 .. 31 of a chunk, the second 32 .. 63. A warp whose tokens do
// not exist does not multiply; up to half the tokens are the work of warps 0 to 3, one for each tensor core.
//
// Dense weights come from shared memory as they are, by ldmatrix. Packed ones become scale * q + min in 16 bits in
// registers: q is exact, the scale and the min are rounded to 16 bits, and so is the result.
#pragma once

#include "common/cuda/ptx.h"
#include "gemm/gemm_epilogue_cuda.h"
#include "gemm/gemm_wide_copy_cuda.h"
#include "gemm/gemm_wide_scales_cuda.h"

namespace fastinfer::cuda {

template <class Weight, class T, int kTokens, bool kGrouped>
class GemmWarpProducts {
  using Params = typename Weight::Params;
  using Shape = GemmWideShape<Weight::kFormat, kTokens>;
  static constexpr bool kDense = Shape::kDense;
  static constexpr GemmTile kTile = Shape::kTile;
  static constexpr int kChunk = Shape::kChunk, kBlocks = Shape::kBlocks, kRowBytes = Shape::kRowBytes;
  static constexpr int kWarpsRows = kTile.warps_rows, kWarpsTokens = kTile.warps_tokens;
  static constexpr int kWarpsInputs = kTile.warps_inputs, kWarpBlocks = kBlocks / kWarpsInputs;
  static constexpr int kRowTiles = kGemmRowTiles / kWarpsRows, kTokenTiles = kTokens / 8 / kWarpsTokens;  // of a warp
  static constexpr GemmStage kStage = Shape::kStage;

 public:
  using Epilogue = GemmEpilogue<T, kTokens, kWarpsRows, kWarpsTokens, kWarpsInputs, kGrouped>;
  // Chunks: once all threads are at a chunk, the stage of the one before is free.
  static constexpr int kFreedBehind = 1;
  static_assert(Epilogue::kSharedBytes <= kStage.scales);  // the sums leave through a stage

  typename Epilogue::Sums sums;

  __device__ explicit GemmWarpProducts(const Params& params)
      : weight(params),
        weight_place(opaque(lane_weight())),
        x_place(opaque(lane_tokens())),
        scales(params, warp_rows() * kRowTiles) {}

  // `tokens`: those of the unit that exist.
  __device__ void begin_unit(int tokens) {
    sums = {};
    warp_exists = warp_tokens() * kTokenTiles * 8 < tokens;
  }

  __device__ void publish_copies() const {}

  // Adds a chunk's products to the sums. Another one is copied meanwhile.
  template <class StartCopy>
  __device__ void add(const unsigned char* stage, int chunk, StartCopy&& start_copy) {
    start_copy();
    if (warp_exists) multiply(stage, chunk);
  }

  __device__ void finish_unit() {}

 private:
  using Scales = typename GemmWideScales<Weight, T, kRowTiles>::Scales;

  const Weight weight;
  const unsigned weight_place, x_place;  // in a stage, of this lane's part of the warp's weight and tokens
  const GemmWideScales<Weight, T, kRowTiles> scales;
  bool warp_exists = false;

  __device__ static int lane() {
    return threadIdx.x % kWarpSize;
  }
  __device__ static int warp_rows() {
    return threadIdx.x / kWarpSize % kWarpsRows;
  }
  __device__ static int warp_tokens() {
    return threadIdx.x / kWarpSize / kWarpsRows / kWarpsInputs;
  }
  __device__ static int warp_inputs() {
    return threadIdx.x / kWarpSize / kWarpsRows % kWarpsInputs;
  }

  using TokenFragments = uint32_t[2][2];  // mma's b for eight tokens: inputs 0 .. 15 of a block, then 16 .. 31

  // The place of the lane's inputs of the warp's first block and tokens; others are an exclusive or or a sum away.
  __device__ static unsigned lane_tokens() {
    static_assert(kStage.x % 128 == 0);
    const int row = kDense ? lane() % 8 : lane() / 4, input = kDense ? lane() / 8 * 16 : lane() % 4 * 8;
    const int block = warp_inputs() * kWarpBlocks * kBlockInputs * 2;
    return kStage.x + (warp_tokens() * kTokenTiles * 8 + row) * kRowBytes + (input ^ Shape::swizzle(row) ^ block);
  }

  // Inputs of one of the warp's blocks, for its n-th eight tokens, in the order of the weight's.
  __device__ void load_tokens(const unsigned char* stage, int block, int n, TokenFragments& b) const {
    if constexpr (kDense) {
      uint32_t r[4];  // four matrices of eight tokens by eight inputs
      ldmatrix(r, stage + (x_place ^ block * (kBlockInputs * 2)) + n * 8 * kRowBytes);
#pragma unroll
      for (int i = 0; i < 4; ++i) b[i / 2][i % 2] = r[i];
    } else {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const unsigned place = (x_place ^ (block * 2 + j) * 32) + n * 8 * kRowBytes;
        const uint2 inputs = *reinterpret_cast<const uint2*>(stage + place);
        b[j][0] = inputs.x;
        b[j][1] = inputs.y;
      }
    }
  }

  // The place of the lane's part of the warp's first rows and block of the weight.
  __device__ static unsigned lane_weight() {
    const int first_tile = warp_rows() * kRowTiles, first_block = warp_inputs() * kWarpBlocks;
    if constexpr (kDense) {
      const int row = lane() % kTileRows, input = lane() / kTileRows * 16;
      return (first_tile * kTileRows + row) * kRowBytes +
             (input ^ Shape::swizzle(row) ^ first_block * (kBlockInputs * 2));
    } else {
      return Weight::template place<kChunk>(first_tile, first_block) + Weight::template lane_place<kChunk>();
    }
  }

  // 16 of the warp's rows by one of its blocks of the weight, in 16 bits.
  __device__ Fragments load_weight(const unsigned char* stage, int r, int block, const Scales& s) const {
    Fragments f;
    if constexpr (kDense) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        ldmatrix(f.a[j], stage + (weight_place ^ (block * 2 + j) * 32) + r * kTileRows * kRowBytes);
      }
    } else {
      f = weight.template fragments<kChunk>(stage + weight_place, r, block);
      scales.apply(f.a[0], s, r);
      scales.apply(f.a[1], s, r);
    }
    return f;
  }

  // Adds a chunk's products to the sums. Fragments are loaded one row tile ahead, those of x when their registers have
  // been read for the last time.
  __device__ void multiply(const unsigned char* stage, int chunk) {
    constexpr int kSteps = kWarpBlocks * kRowTiles;
    TokenFragments b[kTokenTiles];
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) load_tokens(stage, 0, n, b[n]);
    const int first_block = warp_inputs() * kWarpBlocks;
    Scales s = scales.load(stage + kStage.scales, chunk * kBlocks, first_block);
    Fragments next = load_weight(stage, 0, 0, s);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int r = step % kRowTiles;
      const int block = (step + 1) / kRowTiles;  // the next step's
      const Fragments a = next;
      if (step + 1 < kSteps) {
        if (r + 1 == kRowTiles) s = scales.load(stage + kStage.scales, chunk * kBlocks, first_block + block);
        next = load_weight(stage, (step + 1) % kRowTiles, block, s);
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int n = 0; n < kTokenTiles; ++n) {
          mma<T>(sums.value[r][n], a.a[j], b[n][j]);
          if (j == 1 && r + 1 == kRowTiles && step + 1 < kSteps) load_tokens(stage, block, n, b[n]);
        }
      }
    }
  }
};

}  // namespace fastinfer::cuda
