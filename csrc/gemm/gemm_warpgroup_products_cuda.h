// The products of a chunk of dense weights by wgmma (gemm/gemm_wide_kernel_cuda.h), on Hopper. Each of two warpgroups
// multiplies 64 weight rows, the M side, by all tokens, 16 inputs at a time. Both operands come from shared memory as
// they are. A chunk's products are under way until the next chunk's have been issued, so the tensor cores do not wait
// for the barrier between them; and the stage of a chunk is free one chunk later than with mma:
//
//   chunk              i - 1                     i                        i + 1
//   tensor cores   |   products of i - 2 ... | products of i - 1 ...  | products of i ...
//   warps          issue i - 1, copy, wait   issue i, copy, wait      issue i + 1, copy, wait
//                              for i - 2                  for i - 1                  for i
#pragma once

#include "common/cuda/wgmma.h"
#include "gemm/gemm_epilogue_cuda.h"
#include "gemm/gemm_wide_copy_cuda.h"

namespace fastinfer::cuda {

template <class T, int kTokens, bool kGrouped>
class GemmWarpgroupProducts {
  using Shape = GemmWideShape<WeightFormat::kDense, kTokens>;
  static constexpr int kGroupRows = 64, kStepInputs = 16;

 public:
  using Epilogue = GemmEpilogue<T, kTokens, kGemmRowTiles, 1, 1, kGrouped, kTokens / 8 / 4>;
  static_assert(Epilogue::kSharedBytes <= Shape::kStage.scales);  // the sums leave through a stage
  static constexpr int kFreedBehind = 2;
  static_assert(gemm_stages(WeightFormat::kDense, kTokens, Shape::kStage.scales, 227 * 1024, 1) >= kFreedBehind + 2);

  typename Epilogue::Sums sums;

  __device__ explicit GemmWarpgroupProducts(const GemmParams& /*p*/) {}

  __device__ void begin_unit(int /*tokens*/) {
    sums = {};
    wgmma_fence(sums.value);
  }

  // Comes between the wait for copies and the barrier.
  __device__ void publish_copies() const {
    fence_async_shared();
  }

  // Issues a chunk's products and waits for the one before.
  template <class StartCopy>
  __device__ void add(const unsigned char* stage, int /*chunk*/, StartCopy&& start_copy) {
    const int first_row = threadIdx.x / kWarpSize / 4 * kGroupRows;
    const uint64_t weight = wgmma_matrix(stage + first_row * Shape::kRowBytes);
    const uint64_t x = wgmma_matrix(stage + Shape::kStage.x);
    wgmma_fence();
#pragma unroll
    for (int input = 0; input < Shape::kChunk; input += kStepInputs) {
      const int bytes = input * 2;
      wgmma<T, kTokens>(registers(), weight + bytes / 16, x + bytes / 16);
    }
    wgmma_commit();
    start_copy();
    wgmma_wait<1>();
  }

  __device__ void finish_unit() {
    wgmma_wait<0>(sums.value);
  }

 private:
  __device__ float (&registers()) [kTokens / 2] { return reinterpret_cast<float (&)[kTokens / 2]>(sums.value); }
};

}  // namespace fastinfer::cuda
