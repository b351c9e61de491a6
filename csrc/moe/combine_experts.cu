// Bound by memory: a thread does 16 bytes of the output.
#include "moe/combine_experts.h"

#include <algorithm>

#include "common/cuda/dtype.h"
#include "common/cuda/launch.h"
#include "common/cuda/ptx.h"
#include "common/cuda/vector_io.h"

namespace fastinfer::cuda {
namespace {

constexpr int64_t kMostThreads = 256;

template <class T, int kCount>
__global__ void combine_experts_kernel(CombineExpertsParams p) {
  grid_dependency_wait();
  grid_dependency_launch();
  const int64_t i = (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * kCount, token = blockIdx.x;
  if (i >= p.hidden) return;
  const T* x = static_cast<const T*>(p.x) + token * p.top_k * p.hidden + i;
  const float* weights = p.expert_weights + token * p.top_k;
  float sum[kCount] = {};
  for (int k = 0; k < p.top_k; ++k, x += p.hidden) {
    if (!p.has(token * p.top_k, k)) continue;
    const auto row = load_vector<kCount>(x);
#pragma unroll
    for (int j = 0; j < kCount; ++j) sum[j] += weights[k] * to_float(row.values[j]);
  }
  const int64_t offset = token * p.hidden + i;
  if (p.residual != nullptr) {
    const auto residual = load_vector<kCount>(static_cast<const T*>(p.residual) + offset);
#pragma unroll
    for (int j = 0; j < kCount; ++j) sum[j] += to_float(residual.values[j]);
  }
  Vector<T, kCount> out;
#pragma unroll
  for (int j = 0; j < kCount; ++j) out.values[j] = from_float<T>(sum[j]);
  store_vector(static_cast<T*>(p.out) + offset, out);
}

template <class T, int kCount>
void launch_rows(const CombineExpertsParams& p, void* stream) {
  const int64_t vectors = (p.hidden + kCount - 1) / kCount;
  const int64_t threads = std::min((vectors + 31) / 32 * 32, kMostThreads);
  const LaunchConfig config{.grid = p.tokens,
                            .block = static_cast<unsigned>(threads),
                            .grid_y = static_cast<unsigned>((vectors + threads - 1) / threads),
                            .dependent = true};
  launch("combine_experts", combine_experts_kernel<T, kCount>, config, stream, p);
}

}  // namespace

void combine_experts(const CombineExpertsParams& p, void* stream) {
  if (p.hidden == 0) return;
  dispatch_cuda(p.dtype, [&]<class T>(T) {
    constexpr int kVector = kVectorElements<T>;
    const bool vectorised = p.hidden % kVector == 0 && vector_aligned(p.x, p.residual, p.out);
    vectorised ? launch_rows<T, kVector>(p, stream) : launch_rows<T, 1>(p, stream);
  });
}

}  // namespace fastinfer::cuda
