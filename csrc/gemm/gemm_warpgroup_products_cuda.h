// The products of a chunk by wgmma (gemm/gemm_wide_kernel_cuda.h), on Hopper. Each of two warpgroups multiplies 64
// weight rows, the M side, by all tokens, 16 inputs at a time.
//
// Both come from shared memory, dense weights as they are. A chunk's products are under way until the next chunk's have
// been issued, so the tensor cores do not wait for the barrier between them; and the stage of a chunk is free one chunk
// later than with mma:
//
//   chunk              i - 1                     i                        i + 1
//   tensor cores   |   products of i - 2 ... | products of i - 1 ...  | products of i ...
//   warps          issue i - 1, copy, wait   issue i, copy, wait      issue i + 1, copy, wait
//                              for i - 2                  for i - 1                  for i
//
// Of a packed weight, each warp writes its 16 rows as scale * q + min in 16 bits to one of two places in shared memory
// behind the stages, before the products of a chunk are issued and while those of the chunk before read the other
// place. (Fragments in registers would have to be waited for: ptxas 13.0 gives their registers away while products read
// them.)
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
  static constexpr int kTableBytes = gemm_table_bytes(Weight::kFormat);
  static constexpr int kWidenedBytes = kGemmRows * Shape::kRowBytes;  // of a chunk

 public:
  using Epilogue = GemmEpilogue<T, kTokens, kGemmRowTiles, 1, 1, kGrouped, kTokens / 8 / 4>;
  static_assert(Epilogue::kSharedBytes <= Shape::kStage.scales);  // the sums leave through a stage
  static constexpr int kFreedBehind = 2;
  static_assert(Shape::kStage.x % 1024 == 0);  // as are stages
  static_assert(Shape::kDense || 2 * kWidenedBytes == kWidenedWeightBytes);

  typename Epilogue::Sums sums;

  __device__ explicit GemmWarpgroupProducts(const Params& p)
      : weight(p),
        scales(p, warp()),
        widened(kTableBytes + p.plan.stages * p.plan.stage_bytes),
        weight_place(opaque(lane_weight())),
        widened_place(opaque(lane_widened())),
        one_scale(scales.has_one()) {}

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
    const unsigned char* rows = stage;
    if constexpr (!Shape::kDense) {
      unsigned char* const to = dynamic_shared() + widened + chunk % 2 * kWidenedBytes;
      widen(stage, chunk, to);
      fence_async_shared();
      named_barrier(1 + group(), kGroupThreads);
      rows = to;
    }
    const uint64_t a = wgmma_matrix(rows + group() * kGroupRows * Shape::kRowBytes);
    const uint64_t b = wgmma_matrix(stage + Shape::kStage.x);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int place = i * kStepInputs * 2 / 16;
      wgmma<T, kTokens>(registers(), a + place, b + place);
    }
    wgmma_commit();
    start_copy();
    wgmma_wait<1>();
  }

  __device__ void finish_unit() {
    wgmma_wait<0>(sums.value);
  }

 private:
  static constexpr int kGroupThreads = 128;
  static constexpr int kLaneBytes = Shape::kBlockBytes / 64;         // of 16 inputs
  static constexpr int kOrderBit = Shape::kPackedBits == 4 ? 2 : 1;  // by which half a warp's rows are told apart

  const Weight weight;
  const GemmWideScales<Weight, T, 1> scales;
  const int widened;             // the place in shared memory of widened weights
  const unsigned weight_place;   // of the lane's first packed bytes, in a stage
  const unsigned widened_place;  // of the same in 16 bits
  const bool one_scale;          // a row of a chunk has one scale, in fp16

  __device__ static int warp() {
    return threadIdx.x / kWarpSize;
  }
  __device__ static int group() {
    return threadIdx.x / kGroupThreads;
  }

  __device__ float (&registers()) [kTokens / 2] { return reinterpret_cast<float (&)[kTokens / 2]>(sums.value); }

  // The chunk's four sixteens of inputs come in an order that depends on the row g of a tile: rows that a warp reads or
  // writes at the same time then meet different banks.
  __device__ static unsigned first_sixteen() {
    const unsigned g = threadIdx.x % kWarpSize / 4;
    return (g ^ (g >> kOrderBit) % 2) % 4;
  }
  // The lane's bytes of its first sixteen, in a stage.
  __device__ static unsigned lane_weight() {
    if constexpr (Shape::kDense) {
      return 0;
    } else {
      return Weight::template place<Shape::kChunk>(warp(), first_sixteen() / 2) +
             Weight::template lane_place<Shape::kChunk>() + first_sixteen() % 2 * kLaneBytes;
    }
  }
  // Where their 16 bits go: a lane has 4 of 16 inputs of rows g and g + 8.
  __device__ static unsigned lane_widened() {
    const unsigned g = threadIdx.x % kWarpSize / 4, t = threadIdx.x % 4;
    return (warp() * kTileRows + g) * Shape::kRowBytes +
           ((first_sixteen() * 32 + t * 8) ^ matrix_swizzle(Shape::kRowBytes, g));
  }

  // Writes the warp's rows of a chunk as scale * q + min in 16 bits.
  __device__ void widen(const unsigned char* stage, int chunk, unsigned char* to) const {
    const unsigned char* const chunk_scales = stage + Shape::kStage.scales;
    if (one_scale) {
      const auto s = scales.load_one(chunk_scales);
      widen_steps(stage, to, [&](unsigned) { return s; });
    } else {
      widen_steps(stage, to, [&](unsigned block) {
        return scales.load(chunk_scales, chunk * Shape::kBlocks, static_cast<int>(block));
      });
    }
  }

  template <class LoadScales>
  __device__ void widen_steps(const unsigned char* stage, unsigned char* to, const LoadScales& load_scales) const {
    // Of the places, a step changes bits that are the sixteen's alone.
    uint32_t a[kSteps][4];
    auto s = load_scales(first_sixteen() / 2);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (step > 0 && step % 2 == 0) s = load_scales(first_sixteen() / 2 ^ step / 2);
      weight.sixteen(stage + (weight_place ^ (step / 2 * Shape::kBlockBytes | step % 2 * kLaneBytes)), a[step]);
      scales.apply(a[step], s, 0);
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      unsigned char* const at = to + (widened_place ^ step * 32);
      *reinterpret_cast<uint2*>(at) = make_uint2(a[step][0], a[step][2]);
      *reinterpret_cast<uint2*>(at + 8 * Shape::kRowBytes) = make_uint2(a[step][1], a[step][3]);
    }
  }
};

}  // namespace fastinfer::cuda
