// xIELU on the GPU: a thread does 16 bytes. In fp32 memory is the bound; in 16 bits the instructions of expm1 are, at
// three fifths of the memory's speed on an H100.
#include "elementwise/xielu.h"

#include "common/cuda/dtype.h"
#include "common/cuda/launch.h"
#include "common/cuda/ptx.h"
#include "common/cuda/vector_io.h"

namespace fastinfer::cuda {
namespace {

constexpr unsigned kThreads = 256;

template <class T, int kCount>
__global__ void xielu_kernel(XieluParams p) {
  grid_dependency_wait();
  grid_dependency_launch();
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kCount;
  if (i >= p.count) return;
  auto v = load_vector<kCount>(static_cast<const T*>(p.x) + i);
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    const float x = to_float(v.values[j]);
    const float below = p.negative * (expm1f(x > p.eps ? p.eps : x) - x);  // NaN stays
    v.values[j] = from_float<T>((x > 0.0f ? p.positive * x * x : below) + p.beta * x);
  }
  store_vector(static_cast<T*>(p.out) + i, v);
}

}  // namespace

void xielu(const XieluParams& p, void* stream) {
  dispatch_cuda(p.dtype, [&]<class T>(T) {
    constexpr int kVector = kVectorElements<T>;
    const bool vectorised = p.count % kVector == 0 && vector_aligned(p.x, p.out);
    const int64_t threads = vectorised ? p.count / kVector : p.count;
    const LaunchConfig config{.grid = (threads + kThreads - 1) / kThreads, .block = kThreads, .dependent = true};
    launch("xielu", vectorised ? xielu_kernel<T, kVector> : xielu_kernel<T, 1>, config, stream, p);
  });
}

}  // namespace fastinfer::cuda
