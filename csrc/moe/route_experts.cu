// Two kernels: a warp per token chooses its experts; then a block per expert lists its rows in their order, so that the
// result does not depend on which block came first.
#include "common/cuda/dtype.h"
#include "common/cuda/launch.h"
#include "common/cuda/ptx.h"
#include "common/cuda/reduce.h"
#include "moe/route_experts.h"

namespace fastinfer::cuda {
namespace {

constexpr int kTokens = 4;  // per block: one per warp
constexpr int kSortThreads = 256;
constexpr int kSortWarps = kSortThreads / kWarpSize;

// A lane holds the keys of kSlots experts, 32 apart.
template <class T, int kSlots>
__global__ void route_experts_kernel(RouteExpertsParams p) {
  grid_dependency_wait();
  grid_dependency_launch();
  const int lane = threadIdx.x % kWarpSize;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kTokens + threadIdx.x / kWarpSize;
  if (token >= p.tokens) return;
  const T* logits = static_cast<const T*>(p.logits) + token * p.logits_stride;
  unsigned long long keys[kSlots];
#pragma unroll
  for (int i = 0; i < kSlots; ++i) {
    const int expert = lane + i * kWarpSize;
    keys[i] = expert < p.experts ? expert_key(to_float(logits[expert]), expert) : 0;
  }
  const auto best = [&] {
    unsigned long long key = 0;
#pragma unroll
    for (int i = 0; i < kSlots; ++i) key = max(key, keys[i]);
    for (int offset = kWarpSize / 2; offset > 0; offset /= 2) key = max(key, __shfl_xor_sync(kFullMask, key, offset));
    return key;
  };
  const float largest = logit_of(best());
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < kSlots; ++i) {
    if (keys[i] != 0) total += expf(logit_of(keys[i]) - largest);
  }
  total = warp_sum(total);
  float chosen = 0.0f, weight = 0.0f;  // the weight and the id of this lane are written at the end
  int id = 0;
  for (int k = 0; k < p.top_k; ++k) {
    const unsigned long long key = best();
    const float probability = expf(logit_of(key) - largest) / total;
    chosen += probability;
    if (lane == k) {
      weight = probability;
      id = expert_of(key);
    }
#pragma unroll
    for (int i = 0; i < kSlots; ++i) keys[i] = keys[i] == key ? 0 : keys[i];
  }
  if (lane >= p.top_k) return;
  p.expert_weights[token * p.top_k + lane] = p.renormalize ? weight / chosen : weight;
  p.expert_ids[token * p.top_k + lane] = id;
}

// Threads before this one that say yes, and of all the block; `counts` has a number for each warp.
__device__ int2 count_before(bool mine, int* counts) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const unsigned votes = __ballot_sync(kFullMask, mine);
  __syncthreads();  // the previous counts have been read
  if (lane == 0) counts[warp] = __popc(votes);
  __syncthreads();
  int2 result{__popc(votes & ((1u << lane) - 1)), 0};
  for (int i = 0; i < kSortWarps; ++i) {
    if (i < warp) result.x += counts[i];
    result.y += counts[i];
  }
  return result;
}

__global__ void sort_rows_kernel(RouteExpertsParams p) {
  grid_dependency_wait();
  grid_dependency_launch();
  int* const counts = reinterpret_cast<int*>(dynamic_shared());
  const int expert = blockIdx.x, rows = static_cast<int>(p.tokens) * p.top_k;
  int start = 0;
  for (int first = 0; first < rows; first += kSortThreads) {
    const int row = first + static_cast<int>(threadIdx.x);
    start += count_before(row < rows && p.expert_ids[row] < expert, counts).y;
  }
  int next = start;
  for (int first = 0; first < rows; first += kSortThreads) {
    const int row = first + static_cast<int>(threadIdx.x);
    const bool mine = row < rows && p.expert_ids[row] == expert;
    const int2 before = count_before(mine, counts);
    if (mine) p.row_ids[next + before.x] = row;
    next += before.y;
  }
  if (threadIdx.x != 0) return;
  p.expert_start[expert] = start;
  if (expert + 1 == p.experts) p.expert_start[p.experts] = rows;
}

}  // namespace

void route_experts(const RouteExpertsParams& p, void* stream) {
  const LaunchConfig config{
      .grid = (p.tokens + kTokens - 1) / kTokens, .block = kTokens * kWarpSize, .dependent = true};
  dispatch_cuda(p.dtype, [&]<class T>(T) {
    const auto kernel = p.experts <= 128 ? route_experts_kernel<T, 4> : route_experts_kernel<T, 32>;
    launch("route_experts", kernel, config, stream, p);
  });
  const LaunchConfig sort{
      .grid = p.experts, .block = kSortThreads, .shared_bytes = kSortWarps * sizeof(int), .dependent = true};
  launch("sort_rows", sort_rows_kernel, sort, stream, p);
}

}  // namespace fastinfer::cuda
