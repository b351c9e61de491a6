// Activations on the GPU, gated or not: bound by memory, so a thread does 16 bytes of the output, and exact functions
// cost nothing.
#include "elementwise/activation_and_mul.h"

#include <algorithm>

#include "common/cuda/dtype.h"
#include "common/cuda/launch.h"
#include "common/cuda/ptx.h"
#include "common/cuda/vector_io.h"

namespace fastinfer::cuda {
namespace {

constexpr int64_t kMostThreads = 256;

// The same functions as in elementwise/activation_and_mul_cpu.h.
__device__ float apply(Activation activation, float x) {
  switch (activation) {
    case Activation::kSilu: return x / (1.0f + expf(-x));
    // 0.5 x (1 + tanh(u)) = x sigmoid(2u), with u = sqrt(2 / pi) (x + 0.044715 x^3)
    case Activation::kGeluTanh: return x / (1.0f + expf(-x * (1.5957691216f + 0.0713548162f * x * x)));
    default: return 0.5f * x * (1.0f + erff(x * 0.70710678f));
  }
}

template <class T, int kCount>
__global__ void activation_and_mul_kernel(ActivationAndMulParams p) {
  grid_dependency_wait();
  grid_dependency_launch();
  const int64_t i = (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * kCount, row = blockIdx.x;
  if (i >= p.d) return;
  const T* x = static_cast<const T*>(p.x) + row * (p.gated ? 2 * p.d : p.d) + i;
  const auto gate = load_vector<kCount>(x);
  Vector<T, kCount> up{}, out;
  if (p.gated) up = load_vector<kCount>(x + p.d);
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    const float activated = apply(p.activation, to_float(gate.values[j]));
    out.values[j] = from_float<T>(p.gated ? activated * to_float(up.values[j]) : activated);
  }
  store_vector(static_cast<T*>(p.out) + row * p.d + i, out);
}

template <class T, int kCount>
void launch_rows(const ActivationAndMulParams& p, void* stream) {
  const int64_t vectors = (p.d + kCount - 1) / kCount;
  const int64_t threads = std::min((vectors + 31) / 32 * 32, kMostThreads);
  const LaunchConfig config{.grid = p.rows,
                            .block = static_cast<unsigned>(threads),
                            .grid_y = static_cast<unsigned>((vectors + threads - 1) / threads),
                            .dependent = true};
  launch("activation_and_mul", activation_and_mul_kernel<T, kCount>, config, stream, p);
}

}  // namespace

void activation_and_mul(const ActivationAndMulParams& p, void* stream) {
  if (p.d == 0) return;
  dispatch_cuda(p.dtype, [&]<class T>(T) {
    constexpr int kVector = kVectorElements<T>;
    const bool vectorised = p.d % kVector == 0 && vector_aligned(p.x, p.out);
    vectorised ? launch_rows<T, kVector>(p, stream) : launch_rows<T, 1>(p, stream);
  });
}

}  // namespace fastinfer::cuda
