// Activations on the GPU, gated or not: bound by memory, so a thread does 16 bytes of the output, and exact functions
// cost nothing.
#include "elementwise/activation_and_mul.h"

#include <algorithm>

#include "common/cuda/dtype.h"
#include "common/cuda/launch.h"
#include "common/cuda/ptx.h"
#include "common/cuda/vector_io.h"
#include "elementwise/gated_inputs_cuda.h"

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

template <class T, bool kLimited, int kCount>
__global__ void activation_and_mul_kernel(ActivationAndMulParams p) {
  grid_dependency_wait();
  grid_dependency_launch();
  const int64_t i = (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * kCount, row = blockIdx.x;
  if (i >= p.d) return;
  const auto gate = load_vector<kCount>(static_cast<const T*>(p.x) + row * p.x_stride + i);
  Vector<T, kCount> up{}, out;
  if (p.up != nullptr) up = load_vector<kCount>(static_cast<const T*>(p.up) + row * p.up_stride + i);
  if constexpr (kLimited) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const float activated = apply(p.activation, to_float(gate.values[j])), u = to_float(up.values[j]);
      // Comparisons, unlike fminf and fmaxf, keep NaN.
      const float most = activated > p.limit ? p.limit : activated;
      out.values[j] = from_float<T>(most * (u > p.limit ? p.limit : u < -p.limit ? -p.limit : u));
    }
  } else if (p.activation == Activation::kClampedSwiglu) {  // apart, so that the others' instructions stay as few
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const GatedInputs inputs(p.activation, to_float(gate.values[j]), to_float(up.values[j]));
      out.values[j] = from_float<T>(inputs.gate / (1.0f + expf(-inputs.gain * inputs.gate)) * inputs.up);
    }
  } else {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const float activated = apply(p.activation, to_float(gate.values[j]));
      out.values[j] = from_float<T>(p.up != nullptr ? activated * to_float(up.values[j]) : activated);
    }
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
  const auto kernel =
      p.limit > 0.0f ? activation_and_mul_kernel<T, true, kCount> : activation_and_mul_kernel<T, false, kCount>;
  launch("activation_and_mul", kernel, config, stream, p);
}

}  // namespace

void activation_and_mul(const ActivationAndMulParams& p, void* stream) {
  if (p.d == 0) return;
  dispatch_cuda(p.dtype, [&]<class T>(T) {
    constexpr int kVector = kVectorElements<T>;
    const bool vectorised = p.d % kVector == 0 && p.up_stride % kVector == 0 && vector_aligned(p.x, p.up, p.out);
    vectorised ? launch_rows<T, kVector>(p, stream) : launch_rows<T, 1>(p, stream);
  });
}

}  // namespace fastinfer::cuda
