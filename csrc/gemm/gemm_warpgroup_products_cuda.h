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
// Of a packed weight, each warp writes its 16 rows in 16 bits (gemm/gemm_warp_products_cuda.h) to one of two places in
// shared memory behind the stages, before the products of a chunk are issued and while those of the chunk before read
// the other place. (Fragments in registers would have to be waited for: ptxas 13.0 gives their registers away while
// products read them.)
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
        one_group(p.plan.chunk_groups <= 1) {}

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

  const Weight weight;
  const GemmWideScales<Weight, T, 1> scales;
  const int widened;     // the place in shared memory of widened weights
  const bool one_group;  // all of a chunk's weights of a row have one scale

  __device__ static int warp() {
    return threadIdx.x / kWarpSize;
  }
  __device__ static int group() {
    return threadIdx.x / kGroupThreads;
  }

  __device__ float (&registers()) [kTokens / 2] { return reinterpret_cast<float (&)[kTokens / 2]>(sums.value); }

  // Writes the warp's rows of a chunk as scale * q + min in 16 bits. A lane has 4 of 16 inputs of two rows. Lanes take
  // the chunk's four sixteens in different orders, so that those which write at the same time meet different banks.
  __device__ void widen(const unsigned char* stage, int chunk, unsigned char* to) const
    requires(!Shape::kDense)
  {
    constexpr int kLaneBytes = Weight::kBlockBytes / 64;  // of 16 inputs
    const unsigned lane = opaque(threadIdx.x) % kWarpSize, g = lane / 4, t = lane % 4, first = g % 4;
    const unsigned row_place = (warp() * kTileRows + g) * Shape::kRowBytes,
                   place = (first ^ g / 2) * 32 + (t / 2 ^ g % 2) * 16 + t % 2 * 8;
    const unsigned from = Weight::template place<Shape::kChunk>(warp(), first / 2) +
                          Weight::template lane_place<Shape::kChunk>() + first % 2 * kLaneBytes;
    const auto load_scales = [&](int block) {
      return scales.load(stage + Shape::kStage.scales, chunk * Shape::kBlocks, block);
    };
    auto s = load_scales(0);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (!one_group) s = load_scales(static_cast<int>(first ^ step) / 2);
      uint32_t a[4];
      weight.sixteen(stage + (from ^ (step / 2 * Weight::kBlockBytes | step % 2 * kLaneBytes)), a);
      scales.apply(a, s, 0);
      unsigned char* const at = to + row_place + (place ^ step * 32);
      *reinterpret_cast<uint2*>(at) = make_uint2(a[0], a[2]);
      *reinterpret_cast<uint2*>(at + 8 * Shape::kRowBytes) = make_uint2(a[1], a[3]);
    }
  }
};

}  // namespace fastinfer::cuda
