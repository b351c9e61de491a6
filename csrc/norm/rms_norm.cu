// RMSNorm on the GPU: a block per row, 16-byte accesses where the row allows. Up to 32 KB of a row stay in registers,
// so that memory is read once; a longer row's later sweeps find the L1 or L2.
#include "norm/rms_norm.h"

#include "common/cuda/launch.h"
#include "common/cuda/ptx.h"
#include "common/cuda/quantize_row.h"
#include "norm/rms_norm_plan.h"

namespace fastinfer::cuda {
namespace {

constexpr size_t kSharedBytes = 2 * kWarpSize * sizeof(float);  // for block_sum and block_max

// kHeld: vectors of the row that a thread keeps in registers; with 0 it reads them again in each sweep.
template <class T, int kCount, int kHeld, bool kQuantize>
__global__ void __launch_bounds__(kHeld == 0 ? 1024 : 512) rms_norm_kernel(RmsNormParams p) {
  constexpr int kSlots = kHeld == 0 ? 1 : kHeld;
  float values[kSlots][kCount], weight[kSlots][kCount];
  const int64_t offset = blockIdx.x * p.hidden;
  const T* const x = static_cast<const T*>(p.x) + offset;
  T* const residual = p.residual != nullptr ? static_cast<T*>(p.residual) + offset : nullptr;

  const auto each_vector = [&](auto&& fn) { cuda::each_vector<kCount, kHeld>(p.hidden, fn); };
  const auto load_weight = [&](int v, int64_t i) {
    if (p.weight_dtype == DType::kFloat32) {
      load_floats(static_cast<const float*>(p.weight) + i, weight[v]);
    } else {
      load_floats(static_cast<const T*>(p.weight) + i, weight[v]);
    }
  };

  if (!p.constant_weights) grid_dependency_wait();
  if constexpr (kHeld > 0) each_vector(load_weight);
  grid_dependency_wait();
  grid_dependency_launch();
  float squares = 0.0f;
  each_vector([&](int v, int64_t i) {
    load_floats(x + i, values[v]);
    if (residual != nullptr) {
      auto sum = load_vector<kCount>(residual + i);
      for (int j = 0; j < kCount; ++j) {
        sum.values[j] = from_float<T>(to_float(sum.values[j]) + values[v][j]);
        values[v][j] = to_float(sum.values[j]);
      }
      store_vector(residual + i, sum);
    }
    for (int j = 0; j < kCount; ++j) squares += values[v][j] * values[v][j];
  });
  float* const shared = reinterpret_cast<float*>(dynamic_shared());
  const float scale = rsqrtf(block_sum(squares, shared) / static_cast<float>(p.hidden) + p.eps) * p.factor;

  const auto normalise = [&](int v, int64_t i) {
    if constexpr (kHeld == 0) {
      load_floats(residual != nullptr ? residual + i : x + i, values[v]);
      load_weight(v, i);
    }
    for (int j = 0; j < kCount; ++j) values[v][j] = values[v][j] * scale * weight[v][j];
  };
  if constexpr (kQuantize) {
    uint32_t largest = 0;
    each_vector([&](int v, int64_t i) {
      normalise(v, i);
      for (int j = 0; j < kCount; ++j) largest = max(largest, magnitude_bits(values[v][j]));
    });
    const RowScale row = row_scale<int8_t>(block_max(largest, reinterpret_cast<uint32_t*>(shared) + kWarpSize));
    if (threadIdx.x == 0) p.scales[blockIdx.x] = row.scale;
    each_vector([&](int v, int64_t i) {
      if constexpr (kHeld == 0) normalise(v, i);
      for (int j = 0; j < kCount; ++j) values[v][j] = row.apply(values[v][j]);
      store_values(static_cast<int8_t*>(p.out) + offset + i, values[v]);
    });
  } else {
    each_vector([&](int v, int64_t i) {
      normalise(v, i);
      if (p.addend != nullptr) {
        const auto addend = load_vector<kCount>(static_cast<const T*>(p.addend) + offset + i);
        for (int j = 0; j < kCount; ++j) values[v][j] += to_float(addend.values[j]) * p.factor;
      }
      store_values(static_cast<T*>(p.out) + offset + i, values[v]);
    });
  }
}

template <class T, bool kQuantize>
void launch_rows(const RmsNormParams& p, void* stream) {
  constexpr int kVector = kVectorElements<T>;
  const bool vectorised = p.hidden % kVector == 0 && vector_aligned(p.x, p.residual, p.addend, p.weight, p.out);
  const RowPlan plan = plan_row(p.rows, p.hidden, vectorised ? kVector : 1, kSharedBytes);
  const auto kernel = !vectorised                ? rms_norm_kernel<T, 1, 0, kQuantize>
                      : plan.thread_vectors == 1 ? rms_norm_kernel<T, kVector, 1, kQuantize>
                      : plan.thread_vectors == 4 ? rms_norm_kernel<T, kVector, 4, kQuantize>
                                                 : rms_norm_kernel<T, kVector, 0, kQuantize>;
  launch("rms_norm", kernel, plan.launch, stream, p);
}

}  // namespace

void rms_norm(const RmsNormParams& p, void* stream) {
  if (p.hidden == 0 && p.scales == nullptr) return;
  dispatch_cuda(p.dtype, [&]<class T>(T) {
    p.scales != nullptr ? launch_rows<T, true>(p, stream) : launch_rows<T, false>(p, stream);
  });
}

}  // namespace fastinfer::cuda
