// LayerNorm on the GPU: a block per row, as rms_norm.cu has it, with a second reduction for the variance.
#include "norm/layer_norm.h"

#include "common/cuda/launch.h"
#include "common/cuda/ptx.h"
#include "common/cuda/reduce.h"
#include "common/cuda/row.h"
#include "norm/rms_norm_plan.h"

namespace fastinfer::cuda {
namespace {

constexpr size_t kSharedBytes = 2 * kWarpSize * sizeof(float);  // for two sums

template <class T, int kCount, int kHeld>
__global__ void __launch_bounds__(kHeld == 0 ? 1024 : 512) layer_norm_kernel(LayerNormParams p) {
  constexpr int kSlots = kHeld == 0 ? 1 : kHeld;
  float values[kSlots][kCount];
  const int64_t offset = blockIdx.x * p.hidden;
  const T* const x = static_cast<const T*>(p.x) + offset;
  const auto width = static_cast<float>(p.hidden);
  float* const shared = reinterpret_cast<float*>(dynamic_shared());

  grid_dependency_wait();
  grid_dependency_launch();
  float sum = 0.0f, squares = 0.0f;
  each_vector<kCount, kHeld>(p.hidden, [&](int v, int64_t i) {
    load_floats(x + i, values[v]);
    for (int j = 0; j < kCount; ++j) sum += values[v][j];
  });
  const float mean = block_sum(sum, shared) / width;
  const auto centre = [&](int v, int64_t i) {
    if constexpr (kHeld == 0) load_floats(x + i, values[v]);
    for (int j = 0; j < kCount; ++j) values[v][j] -= mean;
  };
  each_vector<kCount, kHeld>(p.hidden, [&](int v, int64_t i) {
    centre(v, i);
    for (int j = 0; j < kCount; ++j) squares += values[v][j] * values[v][j];
  });
  const float scale = rsqrtf(block_sum(squares, shared + kWarpSize) / width + p.eps);

  const auto load_vector_arg = [&](const void* vector, int64_t i, float (&to)[kCount]) {
    if (p.weight_dtype == DType::kFloat32) {
      load_floats(static_cast<const float*>(vector) + i, to);
    } else {
      load_floats(static_cast<const T*>(vector) + i, to);
    }
  };
  each_vector<kCount, kHeld>(p.hidden, [&](int v, int64_t i) {
    if constexpr (kHeld == 0) centre(v, i);
    float weight[kCount], bias[kCount];
    load_vector_arg(p.weight, i, weight);
    load_vector_arg(p.bias, i, bias);
    for (int j = 0; j < kCount; ++j) values[v][j] = values[v][j] * scale * weight[j] + bias[j];
    store_values(static_cast<T*>(p.out) + offset + i, values[v]);
  });
}

}  // namespace

void layer_norm(const LayerNormParams& p, void* stream) {
  if (p.hidden == 0) return;
  dispatch_cuda(p.dtype, [&]<class T>(T) {
    constexpr int kVector = kVectorElements<T>;
    const bool vectorised = p.hidden % kVector == 0 && vector_aligned(p.x, p.weight, p.bias, p.out);
    const RowPlan plan = plan_row(p.rows, p.hidden, vectorised ? kVector : 1, kSharedBytes);
    const auto kernel = !vectorised                ? layer_norm_kernel<T, 1, 0>
                        : plan.thread_vectors == 1 ? layer_norm_kernel<T, kVector, 1>
                        : plan.thread_vectors == 4 ? layer_norm_kernel<T, kVector, 4>
                                                   : layer_norm_kernel<T, kVector, 0>;
    launch("layer_norm", kernel, plan.launch, stream, p);
  });
}

}  // namespace fastinfer::cuda
