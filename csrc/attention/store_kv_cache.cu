// The store on the GPU: bound by memory, 16 bytes a lane. Of a quantized head the second read finds the L1.
#include "attention/store_kv_cache.h"

#include "attention/store_kv_cache_cuda.h"
#include "attention/store_kv_cache_plan.h"
#include "common/cuda/launch.h"
#include "common/cuda/ptx.h"

namespace fastinfer::cuda {
namespace {

template <class T, int kCount>
__global__ void store_kv_cache_kernel(StoreKvCacheParams p, int lanes) {
  grid_dependency_wait();
  grid_dependency_launch();
  const LaneGroup group(lanes);
  const KvCacheSlots& cache = p.cache;
  const int64_t token = blockIdx.x;
  const int unit = blockIdx.y * (blockDim.x / lanes) + threadIdx.x / lanes;  // heads of k, then of v
  const bool valid = unit < 2 * cache.heads, is_key = unit < cache.heads;
  const int head = valid ? unit % cache.heads : 0;
  const T* x =
      is_key ? static_cast<const T*>(p.k) + token * p.k_stride : static_cast<const T*>(p.v) + token * p.v_stride;
  store_head<kCount>(group, cache, x + static_cast<int64_t>(head) * cache.head_dim, is_key ? cache.k : cache.v,
                     is_key ? cache.k_scale : cache.v_scale, valid ? slot_of(cache, token) : -1, head,
                     is_key ? kInt4KeyGroup : kInt4ValueGroup);
}

}  // namespace

void store_kv_cache(const StoreKvCacheParams& p, void* stream) {
  const KvCacheSlots& cache = p.cache;
  if (cache.heads == 0 || cache.head_dim == 0) return;
  dispatch_cuda(p.dtype, [&]<class T>(T) {
    constexpr int kVector = kVectorElements<T>;
    const bool vectorised = cache.head_dim % kVector == 0 && p.k_stride % kVector == 0 && p.v_stride % kVector == 0 &&
                            vector_aligned(p.k, p.v, cache.k, cache.v);
    const HeadPlan plan = plan_heads(p.tokens, 2 * cache.heads, cache.head_dim, vectorised ? kVector : 1, 0);
    const auto kernel = vectorised ? store_kv_cache_kernel<T, kVector> : store_kv_cache_kernel<T, 1>;
    launch("store_kv_cache", kernel, plan.launch, stream, p, plan.lanes);
  });
}

}  // namespace fastinfer::cuda
