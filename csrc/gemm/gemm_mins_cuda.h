// The minimums of a packed weight with 64 tokens: sums += min * sum(x) of each group of inputs.
//
// With fewer tokens each warp adds up x for itself, by mma with a matrix of ones. Here the warps share that out: each
// adds up eight tokens of a chunk, which then wait in shared memory with the chunk's minimums. After kBatch chunks that
// is a product of its own, [rows, kBatch] by [kBatch, tokens], for which mma_tf32 holds the minimums as they are and
// the sums in two parts, 22 bits:
//
//   mma's inner index    0 .. 3                      4 .. 7
//   a (rows)             min of chunk 0 .. 3         the same
//   b (tokens)           sum(x), its upper 11 bits   the next 11 bits
//
// The two warps that share the inputs of a chunk share the tokens of this product.
#pragma once

#include <type_traits>

#include "common/cuda/dtype.h"
#include "common/cuda/ptx.h"
#include "common/cuda/reduce.h"
#include "gemm/gemm_plan.h"

namespace fastinfer::cuda {

template <class T>
inline constexpr uint32_t kOnes = std::is_same_v<T, __half> ? 0x3c003c00u : 0x3f803f80u;

template <class T, int kTokens, int kChunk>
class GemmMins {
  static constexpr int kBatch = 4, kSlots = 2 * kBatch;  // a batch is multiplied while the next one is written
  // A slot has 16 bytes for each token: the sum's parts, and the minimums of two rows. Its 32 bytes more spread the
  // reads of four slots over the banks.
  static constexpr int kPieceBytes = 16, kSlotBytes = kTokens * kPieceBytes + 32;
  static_assert(kGemmRows == 2 * kTokens);
  static constexpr int kRowBytes = shared_row_bytes(kChunk);
  static constexpr GemmStage kStage = gemm_stage(WeightFormat::kInt4, kTokens, kChunk);
  static_assert(kChunk == 128 && kTokens == 64);  // a chunk has one min for a row; eight tokens for each of eight warps

 public:
  // They lie where the epilogue's sums will.
  static constexpr int kBytes = kSlots * kSlotBytes;

  // `shared`: of so many bytes.
  __device__ explicit GemmMins(unsigned shared) : shared(opaque(shared)) {
    const int lane = threadIdx.x % kWarpSize, token = threadIdx.x / kWarpSize * 8 + lane % 8;
    // Rows 0 .. 7 of mma's a are the first half of a token's inputs, rows 8 .. 15 the second one. The order of inputs
    // does not matter: every other four tokens begin eight inputs further on, so that no two meet in a bank.
    x_place = opaque(kStage.x + token * kRowBytes + lane / 8 % 2 * kChunk + (lane / 16 ^ lane % 8 / 4) * 16);
  }

  // This warp's tokens of a chunk, in mma's d: rows 0 .. 7 for one half of the inputs, rows 8 .. 15 for the other. All
  // columns are alike.
  struct Sums {
    float d[4] = {};
  };

  // Adds up one of kParts parts of the inputs.
  static constexpr int kParts = kChunk / 2 / 16;
  __device__ void add_up(Sums& sums, const unsigned char* stage, int part) const {
    constexpr uint32_t kOne = kOnes<T>;
    const uint32_t ones[2] = {kOne, kOne};
    uint32_t a[4];
    ldmatrix(a, stage + x_place + part * 32);
    mma<T>(sums.d, a, ones);
  }

  // Keeps the sums and the minimums of a unit's chunk.
  __device__ void keep(const Sums& sums, const unsigned char* stage, int chunk) const {
    unsigned char* const slot = slot_of(chunk);
    const float sum = sums.d[0] + sums.d[2];
    const uint32_t upper = opaque(tf32(sum)), lower = opaque(tf32(sum - __uint_as_float(upper)));
    if (threadIdx.x % 4 != 0) return;
    const uint32_t mins = *reinterpret_cast<const uint32_t*>(stage + kStage.scales + kScaleBytes + threadIdx.x);
    *reinterpret_cast<uint4*>(slot + threadIdx.x * 4) = make_uint4(upper, lower, mins, 0);
  }

  // Whether so many chunks of a unit end with a whole batch.
  __device__ static bool is_batch(int chunks) {
    return static_cast<unsigned>(chunks) % kBatch == 0 && chunks > 0;
  }

  // Adds the products of the last batch of a unit's first chunks, for one half of the tokens. All sums are there.
  template <bool kWhole, int kRowTiles>
  __device__ void add(float (&sums)[kRowTiles][kTokens / 8][4], int first_row_tile, int half, int chunks) const {
    const int lane = threadIdx.x % kWarpSize, g = lane / 4, t = lane % 4;
    const int left = kWhole ? kBatch : (chunks - 1) % kBatch + 1;
    const unsigned char* const slot = slot_of(chunks - left + (kWhole ? t : min(t, left - 1)));
    const unsigned char* const mins = slot + (first_row_tile * kTileRows + g) / 2 * kPieceBytes + 8 + g % 2 * 2;
    uint32_t a[kRowTiles][4];
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const auto min = *reinterpret_cast<const __half*>(mins + (r * kTileRows + i * 8) / 2 * kPieceBytes);
        a[r][i] = a[r][i + 2] = kWhole || t < left ? __float_as_uint(to_float(min)) : 0;
      }
    }
    const auto multiply = [&]<int kFirst>(std::integral_constant<int, kFirst>) {
#pragma unroll
      for (int n = kFirst; n < kFirst + kTokens / 16; ++n) {
        const uint2 sum = *reinterpret_cast<const uint2*>(slot + (n * 8 + g) * kPieceBytes);
        const uint32_t b[2] = {sum.x, sum.y};
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) mma_tf32(sums[r][n], a[r], b);
      }
    };
    if (half == 0) {  // registers have no index
      multiply(std::integral_constant<int, 0>{});
    } else {
      multiply(std::integral_constant<int, kTokens / 16>{});
    }
  }

 private:
  const unsigned shared;
  unsigned x_place;

  __device__ unsigned char* slot_of(int chunk) const {
    return dynamic_shared() + shared + static_cast<unsigned>(chunk) % kSlots * kSlotBytes;
  }

  __device__ static uint32_t tf32(float value) {
    return __float_as_uint(value) & 0xffffe000u;
  }
};

// Of all other products.
struct NoMins {
  static constexpr int kBytes = 0;
  struct Sums {};
  __device__ explicit NoMins(unsigned /*shared*/) {}
};

}  // namespace fastinfer::cuda
