// Bound by memory: a thread does 16 bytes, of one group where values share a gate.
#include "elementwise/sigmoid_gate.h"

#include <algorithm>

#include "common/cuda/launch.h"
#include "common/cuda/ptx.h"
#include "common/cuda/row.h"

namespace fastinfer::cuda {
namespace {

constexpr int64_t kMostThreads = 256;

template <class T, bool kGrouped, bool kSoftplus, int kCount>
__global__ void sigmoid_gate_kernel(SigmoidGateParams p) {
  grid_dependency_wait();
  grid_dependency_launch();
  const int64_t i = (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * kCount, row = blockIdx.x;
  if (i >= p.width) return;
  float x[kCount], gate[kCount];
  load_floats(static_cast<const T*>(p.x) + row * p.width + i, x);
  const T* const gates = static_cast<const T*>(p.gate) + row * p.gate_stride;
  if constexpr (kGrouped) {  // a row of a grid has less than 2^32 elements
    const float shared = to_float(gates[static_cast<uint32_t>(i) / static_cast<uint32_t>(p.group_width)]);
#pragma unroll
    for (int j = 0; j < kCount; ++j) gate[j] = shared;
  } else {
    load_floats(gates + i, gate);
  }
  if constexpr (kSoftplus) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) x[j] *= fmaxf(gate[j], 0.0f) + log1pf(expf(-fabsf(gate[j])));
  } else {
#pragma unroll
    for (int j = 0; j < kCount; ++j) x[j] /= 1.0f + expf(-gate[j]);
  }
  store_values(static_cast<T*>(p.out) + row * p.width + i, x);
}

template <class T, bool kGrouped, int kCount>
void launch_rows(const SigmoidGateParams& p, void* stream) {
  const int64_t vectors = (p.width + kCount - 1) / kCount;
  const int64_t threads = std::min((vectors + 31) / 32 * 32, kMostThreads);
  const LaunchConfig config{.grid = p.rows,
                            .block = static_cast<unsigned>(threads),
                            .grid_y = static_cast<unsigned>((vectors + threads - 1) / threads),
                            .dependent = true};
  const auto kernel =
      p.softplus ? sigmoid_gate_kernel<T, kGrouped, true, kCount> : sigmoid_gate_kernel<T, kGrouped, false, kCount>;
  launch("sigmoid_gate", kernel, config, stream, p);
}

}  // namespace

void sigmoid_gate(const SigmoidGateParams& p, void* stream) {
  if (p.width == 0) return;
  dispatch_cuda(p.dtype, [&]<class T>(T) {
    constexpr int kVector = kVectorElements<T>;
    const bool aligned = vector_aligned(p.x, p.out);
    if (p.group_width > 1) {
      const bool vectorised = aligned && p.group_width % kVector == 0;
      vectorised ? launch_rows<T, true, kVector>(p, stream) : launch_rows<T, true, 1>(p, stream);
    } else {
      const bool vectorised =
          aligned && p.width % kVector == 0 && p.gate_stride % kVector == 0 && vector_aligned(p.gate);
      vectorised ? launch_rows<T, false, kVector>(p, stream) : launch_rows<T, false, 1>(p, stream);
    }
  });
}

}  // namespace fastinfer::cuda
