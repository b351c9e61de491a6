// The products of a chunk by wgmma (gemm/gemm_wide_kernel_cuda.h), on Hopper. Each of two warpgroups multiplies 64
// weight rows, the M side, by all tokens, 16 inputs at a time.
//
// Dense weights come from shared memory as they are, as the tokens do. A chunk's products are under way until the next
// chunk's have been issued, so the tensor cores do not wait for the barrier between them; and the stage of a chunk is
// free one chunk later than with mma:
//
//   chunk              i - 1                     i                        i + 1
//   tensor cores   |   products of i - 2 ... | products of i - 1 ...  | products of i ...
//   warps          issue i - 1, copy, wait   issue i, copy, wait      issue i + 1, copy, wait
//                              for i - 2                  for i - 1                  for i
//
// Packed weights become 16-bit fragments in registers (gemm/gemm_warp_products_cuda.h), each warp's 16 rows, which are
// then exchanged between lanes: wgmma takes the inputs of the tokens in their order, and with them those of the weight.
// The products are waited for at once: ptxas 13.0 gives the registers of fragments away while products read them. One
// warpgroup makes fragments while the other one's products are under way.
#pragma once

#include "common/cuda/wgmma.h"
#include "gemm/gemm_epilogue_cuda.h"
#include "gemm/gemm_wide_copy_cuda.h"
#include "gemm/gemm_wide_scales_cuda.h"

namespace fastinfer::cuda {

template <class Weight, class T, int kTokens, bool kGrouped>
class GemmWarpgroupProducts {
  using Params = typename Weight::Params;
  using Shape = GemmWideShape<Weight::kFormat, kTokens>;
  static constexpr int kGroupRows = 64, kStepInputs = 16, kSteps = Shape::kChunk / kStepInputs;

 public:
  using Epilogue = GemmEpilogue<T, kTokens, kGemmRowTiles, 1, 1, kGrouped, kTokens / 8 / 4>;
  static_assert(Epilogue::kSharedBytes <= Shape::kStage.scales);  // the sums leave through a stage
  static constexpr int kFreedBehind = Shape::kDense ? 2 : 1;
  static_assert(Shape::kStage.x % 1024 == 0);  // as are stages

  typename Epilogue::Sums sums;

  __device__ explicit GemmWarpgroupProducts(const Params& p)
      : weight(p), scales(p, warp()), weight_place(opaque(lane_weight())) {}

  __device__ void begin_unit(int /*tokens*/) {
    sums = {};
    wgmma_fence(sums.value);
  }

  // Comes between the wait for copies and the barrier.
  __device__ void publish_copies() const {
    fence_async_shared();
  }

  // Issues a chunk's products. Another chunk is copied meanwhile.
  template <class StartCopy>
  __device__ void add(const unsigned char* stage, int chunk, StartCopy&& start_copy) {
    if constexpr (Shape::kDense) {
      add_dense(stage, start_copy);
    } else {
      add_packed(stage, chunk, start_copy);
    }
  }

  __device__ void finish_unit() {
    wgmma_wait<0>(sums.value);
  }

 private:
  const Weight weight;
  const GemmWideScales<Weight, T, 1> scales;
  const unsigned weight_place;

  __device__ static int warp() {
    return threadIdx.x / kWarpSize;
  }

  // The place of the lane's part of the warp's rows of a packed weight.
  __device__ static unsigned lane_weight() {
    if constexpr (Shape::kDense) {
      return 0;
    } else {
      return Weight::template place<Shape::kChunk>(warp(), 0) + Weight::template lane_place<Shape::kChunk>();
    }
  }

  __device__ float (&registers()) [kTokens / 2] { return reinterpret_cast<float (&)[kTokens / 2]>(sums.value); }

  template <class StartCopy>
  __device__ void add_dense(const unsigned char* stage, StartCopy&& start_copy) {
    const uint64_t x = wgmma_matrix(stage + Shape::kStage.x);
    const uint64_t rows = wgmma_matrix(stage + warp() / 4 * kGroupRows * Shape::kRowBytes);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int place = i * kStepInputs * 2 / 16;
      wgmma<T, kTokens>(registers(), rows + place, x + place);
    }
    wgmma_commit();
    start_copy();
    wgmma_wait<1>();
  }

  template <class StartCopy>
  __device__ void add_packed(const unsigned char* stage, int chunk, StartCopy&& start_copy) {
    start_copy();
    const uint64_t x = wgmma_matrix(stage + Shape::kStage.x);
    uint32_t a[kSteps][4];
#pragma unroll
    for (int block = 0; block < Shape::kBlocks; ++block) {
      Fragments f = weight.template fragments<Shape::kChunk>(stage + weight_place, 0, block);
      scales.apply(f, scales.load(stage + Shape::kStage.scales, chunk * Shape::kBlocks, block), 0);
      to_order_of_inputs(f.a[0], a[block * 2]);
      to_order_of_inputs(f.a[1], a[block * 2 + 1]);
    }
    wgmma_fence(a);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      wgmma<T, kTokens, false>(registers(), a[i], x + i * kStepInputs * 2 / 16);
    }
    wgmma_commit();
    wgmma_wait<0>();
  }

  // With pairs of inputs numbered 0 .. 7, lane t of four has pairs 2t and 2t + 1 of a row in a[0] and a[2], and needs t
  // and t + 4. In each of two exchanges a lane gives one of its pairs to one lane.
  __device__ static void to_order_of_inputs(const uint32_t (&a)[4], uint32_t (&to)[4]) {
    const int t = threadIdx.x % 4, source = t % 2 * 2 + t / 2;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const uint32_t first = t < 2 ? a[row] : a[row + 2], second = t < 2 ? a[row + 2] : a[row];
      const uint32_t one = __shfl_sync(0xffffffffu, first, source, 4);
      const uint32_t other = __shfl_sync(0xffffffffu, second, source ^ 2, 4);
      to[row] = t % 2 == 0 ? one : other;
      to[row + 2] = t % 2 == 0 ? other : one;
    }
  }
};

}  // namespace fastinfer::cuda
