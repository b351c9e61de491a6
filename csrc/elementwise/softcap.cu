// Soft-capped logits on the GPU: bound by memory, a thread does 16 bytes.
#include "elementwise/softcap.h"

#include "common/cuda/dtype.h"
#include "common/cuda/launch.h"
#include "common/cuda/ptx.h"
#include "common/cuda/vector_io.h"

namespace fastinfer::cuda {
namespace {

constexpr unsigned kThreads = 256;

template <class T, int kCount>
__global__ void softcap_kernel(SoftcapParams p) {
  grid_dependency_wait();
  grid_dependency_launch();
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kCount;
  if (i >= p.count) return;
  T* x = static_cast<T*>(p.x) + i;
  auto v = load_vector<kCount>(x);
#pragma unroll
  for (int j = 0; j < kCount; ++j) v.values[j] = from_float<T>(p.cap * tanhf(to_float(v.values[j]) / p.cap));
  store_vector(x, v);
}

}  // namespace

void softcap(const SoftcapParams& p, void* stream) {
  dispatch_cuda(p.dtype, [&]<class T>(T) {
    constexpr int kVector = kVectorElements<T>;
    const bool vectorised = p.count % kVector == 0 && vector_aligned(p.x);
    const int64_t threads = vectorised ? p.count / kVector : p.count;
    const LaunchConfig config{.grid = (threads + kThreads - 1) / kThreads, .block = kThreads, .dependent = true};
    launch("softcap", vectorised ? softcap_kernel<T, kVector> : softcap_kernel<T, 1>, config, stream, p);
  });
}

}  // namespace fastinfer::cuda
