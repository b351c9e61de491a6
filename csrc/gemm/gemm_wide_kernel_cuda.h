// The GPU's matrix product for more than 64 tokens: a pipeline and a main loop that keep the tensor cores busy, for
// every weight format. gemm/gemm_plan.h shows how the work is split over the multiprocessors.
//
// A unit of work is 128 weight rows by 128 or 256 tokens, and a chunk of it 64 inputs. Tokens and dense weights have
// rows of 128 bytes in shared memory, swizzled. Eight warps multiply a chunk by mma (gemm/gemm_warp_products_cuda.h)
// or, on Hopper, by wgmma (gemm/gemm_warpgroup_products_cuda.h).
//
// There are at least three stages. Copies to shared memory (gemm/gemm_wide_copy_cuda.h) run ahead by all but one, on
// Hopper by all but two, also from one unit to the next. The stage of a unit's last chunk then serves for the sums on
// their way out.
#pragma once

#include <type_traits>

#include "gemm/gemm_warp_products_cuda.h"
#include "gemm/gemm_warpgroup_products_cuda.h"
#include "gemm/gemm_wide_copy_cuda.h"

namespace fastinfer::cuda {

template <class Weight, class T, int kTokens, bool kGrouped>
struct GemmWideKernel {
  using Params = typename Weight::Params;
  using Shape = GemmWideShape<Weight::kFormat, kTokens>;
  using Products = std::conditional_t<kHasWgmma, GemmWarpgroupProducts<Weight, T, kTokens, kGrouped>,
                                      GemmWarpProducts<Weight, T, kTokens, kGrouped>>;
  static constexpr bool kWaitsFirst = true;
  static constexpr int kThreads = Shape::kThreads, kResident = gemm_resident(Weight::kFormat, kTokens);
  static constexpr int kTableBytes = gemm_table_bytes(Weight::kFormat);

  const Params& p;

  __device__ explicit GemmWideKernel(const Params& params) : p(params) {}

  // Waits for this thread's copies of the next chunk to multiply.
  __device__ static void wait(int stages) {
    switch (stages - Products::kFreedBehind) {
      case 1: return cp_async_wait<0>();
      case 2: return cp_async_wait<1>();
      default: return cp_async_wait<2>();
    }
  }

  __device__ void run() {
    grid_dependency_launch();
    const TokenTiles<kGrouped> tiles(p);
    Products products(p);
    GemmWideCopy<Weight, T, kTokens, kGrouped> copy(p, tiles);
    unsigned char* const shared = dynamic_shared() + kTableBytes;
    const int stages = p.plan.stages, stage_bytes = p.plan.stage_bytes;
    const auto after = [&](int offset) {
      const int next = offset + stage_bytes;
      return next == stages * stage_bytes ? 0 : next;
    };
    int count = worker_chunks<kGrouped>(p, tiles), ahead_count = count;  // chunks still to be multiplied, to be copied
    int read = 0, written = 0;                                           // offsets of stages
    const auto start_copy = [&] {
      if (--ahead_count >= 0) copy.copy(shared + written);
      cp_async_commit();
      written = after(written);
    };
    GemmPosition<kGrouped, true> here = copy.position();
#pragma unroll 1
    for (int i = Products::kFreedBehind; i < stages; ++i) start_copy();
    while (count > 0) {
      const int chunks = min(p.plan.chunks - here.chunk, count);
      products.begin_unit(here.end_token(p) - here.first_token(p));
#pragma unroll 1
      for (int i = 0; i < chunks; ++i) {
        if (i > 0) read = after(read);
        wait(stages);
        products.publish_copies();
        __syncthreads();  // the chunk is there for everybody, and the stage for the next copy is free
        products.add(shared + read, here.chunk + i, start_copy);
      }
      products.finish_unit();
      __syncthreads();
      typename Products::Epilogue(p, tiles, here.unit, reinterpret_cast<float*>(shared + read)).store(products.sums);
      read = after(read);
      count -= chunks;
      here.next_unit(p, tiles);
    }
  }
};

}  // namespace fastinfer::cuda
