// Integer products on the tensor cores: a pipeline of copies to shared memory, which run ahead by all stages but one or
// two, and products of one chunk after another.
#include "quant/w8a8_gemm.h"

#include <type_traits>

#include "common/cuda/launch.h"
#include "quant/w8a8_gemm_epilogue_cuda.h"
#include "quant/w8a8_gemm_products_cuda.h"

namespace fastinfer::cuda {
namespace {

template <int kTokens>
struct W8a8Kernel {
  using Shape = W8a8Shape<kTokens>;
  using Products =
      std::conditional_t<kHasWgmma && Shape::kWarpgroups, W8a8WarpgroupProducts<kTokens>, W8a8WarpProducts<kTokens>>;
  static constexpr int kAhead = Shape::kTile.stages - Products::kFreedBehind;

  const W8a8GemmParams& p;

  __device__ static unsigned char* stage(int i) {
    return dynamic_shared() + i % Shape::kTile.stages * Shape::kStageBytes;
  }

  __device__ void run() const {
    const int first = static_cast<int>(blockIdx.y) * p.w8a8_plan.split_chunks;
    const int count = min(p.w8a8_plan.split_chunks, p.w8a8_plan.chunks - first);
    W8a8Copy<kTokens> copy(p, first);
    if (!p.constant_weights) grid_dependency_wait();
#pragma unroll 1
    for (int i = 0; i < min(kAhead, count); ++i) copy.weight(stage(i));
    grid_dependency_wait();
    grid_dependency_launch();
#pragma unroll 1
    for (int i = 0; i < kAhead; ++i) {
      if (i < count) copy.x(stage(i));
      cp_async_commit();
    }
    Products products;
    const auto step = [&]<int kSet>(int i) {
      cp_async_wait<kAhead - 1>();
      products.publish_copies();
      __syncthreads();  // chunk i is there for everybody, and the stage for the next copy is free
      if (i + kAhead < count) {
        copy.weight(stage(i + kAhead));
        copy.x(stage(i + kAhead));
      }
      cp_async_commit();
      products.template add<kSet>(stage(i));
      products.wait();
    };
    int i = 0;
#pragma unroll 1
    for (; i + Products::kSets <= count; i += Products::kSets) {
      step.template operator()<0>(i);
      if constexpr (Products::kSets == 2) step.template operator()<1>(i + 1);
    }
    if (Products::kSets == 2 && i < count) step.template operator()<0>(i);
    products.finish();
    cp_async_wait<0>();
    __syncthreads();
    auto* const shared_sums = reinterpret_cast<int32_t*>(dynamic_shared());
    products.sums.share(shared_sums);
    __syncthreads();
    W8a8Epilogue<kTokens>(p, W8a8Unit(p), shared_sums).store();
  }
};

template <int kTokens>
__global__ void __launch_bounds__(kW8a8Threads, w8a8_tile(kTokens).resident)
    w8a8_gemm_kernel(const __grid_constant__ W8a8GemmParams p) {
  W8a8Kernel<kTokens>{p}.run();
}

}  // namespace

void w8a8_gemm(const W8a8GemmParams& p, void* stream) {
  const auto kernel = [&] {
    switch (p.w8a8_plan.tile.tokens) {
      case 8: return w8a8_gemm_kernel<8>;
      case 16: return w8a8_gemm_kernel<16>;
      case 32: return w8a8_gemm_kernel<32>;
      case 64: return w8a8_gemm_kernel<64>;
      case 128: return w8a8_gemm_kernel<128>;
      default: return w8a8_gemm_kernel<256>;
    }
  }();
  launch("w8a8_gemm", kernel, p.w8a8_plan.launch, stream, p);
}

}  // namespace fastinfer::cuda
