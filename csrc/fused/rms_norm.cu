// RMSNorm on the GPU: a block per row, 16-byte accesses where the row allows. The second sweep finds the row in L1 or
// L2, so memory is read once.
#include <algorithm>

#include "common/cuda/dtype.h"
#include "common/cuda/launch.h"
#include "common/cuda/ptx.h"
#include "common/cuda/reduce.h"
#include "common/cuda/vector_io.h"
#include "fused/rms_norm.h"

namespace fastinfer::cuda {
namespace {

template <class T, class W, int kCount>
__global__ void rms_norm_kernel(RmsNormParams p) {
  const int64_t offset = blockIdx.x * p.hidden;
  const T* x = static_cast<const T*>(p.x) + offset;
  T* residual = p.residual != nullptr ? static_cast<T*>(p.residual) + offset : nullptr;
  const W* weight = static_cast<const W*>(p.weight);
  T* out = static_cast<T*>(p.out) + offset;
  const int64_t first = static_cast<int64_t>(threadIdx.x) * kCount, step = static_cast<int64_t>(blockDim.x) * kCount;

  float squares = 0.0f;
  for (int64_t i = first; i < p.hidden; i += step) {
    auto v = load_vector<kCount>(x + i);
    if (residual != nullptr) {
      const auto r = load_vector<kCount>(residual + i);
      for (int j = 0; j < kCount; ++j) v.values[j] = from_float<T>(to_float(v.values[j]) + to_float(r.values[j]));
      store_vector(residual + i, v);
    }
    for (int j = 0; j < kCount; ++j) squares += to_float(v.values[j]) * to_float(v.values[j]);
  }
  const float scale = rsqrtf(block_sum(squares, reinterpret_cast<float*>(dynamic_shared())) / static_cast<float>(p.hidden) + p.eps);

  const T* summed = residual != nullptr ? residual : x;
  for (int64_t i = first; i < p.hidden; i += step) {
    auto v = load_vector<kCount>(summed + i);
    for (int j = 0; j < kCount; ++j) {
      v.values[j] = from_float<T>(to_float(v.values[j]) * scale * to_float(weight[i + j]));
    }
    store_vector(out + i, v);
  }
}

template <class T, class W, int kCount>
void launch_rows(const RmsNormParams& p, void* stream) {
  const int64_t vectors = (p.hidden + kCount - 1) / kCount;
  const auto threads =
      static_cast<unsigned>(std::min<int64_t>((vectors + kWarpSize - 1) / kWarpSize * kWarpSize, 1024));
  launch("rms_norm", rms_norm_kernel<T, W, kCount>, {.grid = p.rows, .block = threads, .shared_bytes = kWarpSize * sizeof(float)}, stream, p);
}

bool aligned(const void* p) {
  return reinterpret_cast<uintptr_t>(p) % 16 == 0;
}

}  // namespace

void rms_norm(const RmsNormParams& p, void* stream) {
  if (p.hidden == 0) return;
  dispatch_cuda(p.dtype, [&]<class T>(T) {
    const bool vectorised = p.hidden % kVectorElements<T> == 0 && aligned(p.x) && aligned(p.residual) && aligned(p.out);
    const auto run = [&]<class W>(W) {
      vectorised ? launch_rows<T, W, kVectorElements<T>>(p, stream) : launch_rows<T, W, 1>(p, stream);
    };
    // The weight is fp32 or has the dtype of x: two variants, not three.
    p.weight_dtype == DType::kFloat32 ? run(float{}) : run(T{});
  });
}

}  // namespace fastinfer::cuda
