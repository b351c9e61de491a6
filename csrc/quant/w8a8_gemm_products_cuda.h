// The integer products of a chunk in shared memory (quant/w8a8_gemm.cu), by mma or, for some tiles on Hopper, by
// wgmma. The weight is the M side, as packed: a lane's 16 bytes of a block of 16 rows by 32 inputs are its A fragment.
// Tokens are the N side.
#pragma once

#include "common/cuda/reduce.h"
#include "common/cuda/wgmma.h"
#include "quant/w8a8_gemm_copy_cuda.h"

namespace fastinfer::cuda {

// Sums of a warp: 16 rows by 8 tokens each, as mma leaves them.
template <int kRowTiles, int kTokenTiles>
struct W8a8Sums {
  const int first_row_tile, first_token_tile;  // of the warp, within the unit
  int32_t value[kRowTiles][kTokenTiles][4] = {};

  // To the places that the epilogue reads.
  __device__ void share(int32_t* shared) const {
    const int lane = threadIdx.x % kWarpSize;
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int token = (first_token_tile + n) * 8 + lane % 4 * 2 + i % 2;
          const int row = (first_row_tile + r) * kTileRows + lane / 4 + i / 2 * 8;
          shared[token * kW8a8SumsStride + split_place(kW8a8Rows, row)] = value[r][n][i];
        }
      }
    }
  }
};

__device__ inline void load_block(const unsigned char* block, uint32_t (&a)[4]) {
  const uint4 q = *reinterpret_cast<const uint4*>(block + threadIdx.x % kWarpSize * 16);
  a[0] = q.x, a[1] = q.y, a[2] = q.z, a[3] = q.w;
}

// Tokens become B fragments by ldmatrix, eight at a time, so that few of them waste nothing. Each warp has 16 rows by
// all tokens, but at most 64 tokens: with more the warps share these out and have more rows, to read shared memory less
// often.
template <int kTokens>
class W8a8WarpProducts {
  using Shape = W8a8Shape<kTokens>;
  static constexpr int kWarpsTokens = kTokens > 64 ? kTokens / 64 : 1;
  static constexpr int kRowTiles = kWarpsTokens, kTokenTiles = kTokens / 8 / kWarpsTokens;

 public:
  static constexpr int kFreedBehind = 1;  // chunks from that which is multiplied to that whose stage is free
  static constexpr int kSets = 1;         // of registers, which chunks use by turns

  W8a8Sums<kRowTiles, kTokenTiles> sums{static_cast<int>(threadIdx.x) / kWarpSize / kWarpsTokens * kRowTiles,
                                        static_cast<int>(threadIdx.x) / kWarpSize % kWarpsTokens * kTokenTiles};

  // Comes between the wait for copies and the barrier.
  __device__ void publish_copies() const {}

  template <int kSet>
  __device__ void add(const unsigned char* stage) {
    const int lane = threadIdx.x % kWarpSize;
#pragma unroll
    for (int block = 0; block < Shape::kBlocks; block += 2) {
      uint32_t a[kRowTiles][2][4];
#pragma unroll
      for (int i = 0; i < kRowTiles * 2; ++i) {
        load_block(stage + ((sums.first_row_tile + i / 2) * Shape::kBlocks + block + i % 2) * Shape::kBlockBytes,
                   a[i / 2][i % 2]);
      }
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n) {
        // Four matrices of eight tokens by 16 bytes: both halves of two blocks.
        const int token = (sums.first_token_tile + n) * 8 + lane % 8;
        const int byte = (block * kBlockInputs + lane / 8 * 16) ^ matrix_swizzle(Shape::kTile.chunk, lane);
        uint32_t b[4];
        ldmatrix(b, stage + Shape::kX + token * Shape::kTile.chunk + byte);
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
          mma_int8(sums.value[r][n], a[r][0], {b[0], b[1]});
          mma_int8(sums.value[r][n], a[r][1], {b[2], b[3]});
        }
      }
    }
  }

  // Waits for the products that read the stage which the next step frees.
  __device__ void wait() {}
  __device__ void finish() {}
};

// Each of two warpgroups multiplies 64 rows, the fragments in registers, by all tokens, which wgmma reads from shared
// memory: twice, where warps read them eight times by ldmatrix. If the block is alone on its multiprocessor, a chunk's
// products are under way until the next chunk's have been issued, so that the tensor cores do not wait for the barrier
// and the fragments. The registers of the fragments are then those of two chunks. That ptxas keeps the first ones until
// their products end is not promised: cmake/machine_code/operands.py looks at what it made.
template <int kTokens>
class W8a8WarpgroupProducts {
  using Shape = W8a8Shape<kTokens>;
  static_assert(Shape::kTile.chunk == 128);  // bytes of a row that wgmma reads

 public:
  static constexpr int kPending = Shape::kTile.resident == 1 ? 1 : 0;
  static constexpr int kFreedBehind = 1 + kPending, kSets = 1 + kPending;

  W8a8Sums<1, kTokens / 8> sums{static_cast<int>(threadIdx.x) / kWarpSize, 0};

  __device__ W8a8WarpgroupProducts() {
    wgmma_fence(registers());
  }

  __device__ void publish_copies() const {
    fence_async_shared();
  }

  template <int kSet>
  __device__ void add(const unsigned char* stage) {
    auto& a = fragments[kSet];
#pragma unroll
    for (int block = 0; block < Shape::kBlocks; ++block) {
      load_block(stage + (sums.first_row_tile * Shape::kBlocks + block) * Shape::kBlockBytes, a[block]);
    }
    const uint64_t x = wgmma_matrix(stage + Shape::kX);
    wgmma_fence(a);
#pragma unroll
    for (int block = 0; block < Shape::kBlocks; ++block) {
      wgmma_int8<kTokens>(registers(), a[block], x + block * kBlockInputs / 16);
    }
    wgmma_commit();
  }

  __device__ void wait() {
    wgmma_wait<kPending>();
  }

  __device__ void finish() {
    wgmma_wait<0>(registers());
  }

 private:
  uint32_t fragments[kSets][Shape::kBlocks][4];

  __device__ int32_t (&registers()) [kTokens / 2] { return reinterpret_cast<int32_t (&)[kTokens / 2]>(sums.value); }
};

}  // namespace fastinfer::cuda
