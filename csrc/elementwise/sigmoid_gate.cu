// Bound by memory: a thread does 16 bytes.
#include "elementwise/sigmoid_gate.h"

#include <algorithm>

#include "common/cuda/launch.h"
#include "common/cuda/ptx.h"
#include "common/cuda/row.h"

namespace fastinfer::cuda {
namespace {

constexpr int64_t kMostThreads = 256;

template <class T, int kCount>
__global__ void sigmoid_gate_kernel(SigmoidGateParams p) {
  grid_dependency_wait();
  grid_dependency_launch();
  const int64_t i = (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * kCount, row = blockIdx.x;
  if (i >= p.width) return;
  float x[kCount], gate[kCount];
  load_floats(static_cast<const T*>(p.x) + row * p.width + i, x);
  load_floats(static_cast<const T*>(p.gate) + row * p.gate_stride + i, gate);
#pragma unroll
  for (int j = 0; j < kCount; ++j) x[j] /= 1.0f + expf(-gate[j]);
  store_values(static_cast<T*>(p.out) + row * p.width + i, x);
}

template <class T, int kCount>
void launch_rows(const SigmoidGateParams& p, void* stream) {
  const int64_t vectors = (p.width + kCount - 1) / kCount;
  const int64_t threads = std::min((vectors + 31) / 32 * 32, kMostThreads);
  const LaunchConfig config{.grid = p.rows,
                            .block = static_cast<unsigned>(threads),
                            .grid_y = static_cast<unsigned>((vectors + threads - 1) / threads),
                            .dependent = true};
  launch("sigmoid_gate", sigmoid_gate_kernel<T, kCount>, config, stream, p);
}

}  // namespace

void sigmoid_gate(const SigmoidGateParams& p, void* stream) {
  if (p.width == 0) return;
  dispatch_cuda(p.dtype, [&]<class T>(T) {
    constexpr int kVector = kVectorElements<T>;
    const bool vectorised =
        p.width % kVector == 0 && p.gate_stride % kVector == 0 && vector_aligned(p.x, p.gate, p.out);
    vectorised ? launch_rows<T, kVector>(p, stream) : launch_rows<T, 1>(p, stream);
  });
}

}  // namespace fastinfer::cuda
