// A block per row. The second sweep finds the row, 16 KB of bf16 at 8192 elements, in the L1.
#include "quant/quantize_int8.h"

#include "common/cuda/launch.h"
#include "common/cuda/ptx.h"
#include "common/cuda/quantize_row.h"
#include "norm/rms_norm_plan.h"

namespace fastinfer::cuda {
namespace {

template <class T, int kCount>
__global__ void quantize_int8_kernel(QuantizeInt8Params p) {
  grid_dependency_wait();
  grid_dependency_launch();
  const T* const x = static_cast<const T*>(p.x) + blockIdx.x * p.hidden;
  const int64_t first = threadIdx.x * kCount, step = blockDim.x * kCount;
  uint32_t largest = 0;
  for (int64_t i = first; i < p.hidden; i += step) {
    const auto v = load_vector<kCount>(x + i);
    for (int j = 0; j < kCount; ++j) largest = max(largest, magnitude_bits(to_float(v.values[j])));
  }
  const RowScale row = row_scale<int8_t>(block_max(largest, reinterpret_cast<uint32_t*>(dynamic_shared())));
  if (threadIdx.x == 0) p.scales[blockIdx.x] = row.scale;
  for (int64_t i = first; i < p.hidden; i += step) {
    const auto v = load_vector<kCount>(x + i);
    float values[kCount];
    for (int j = 0; j < kCount; ++j) values[j] = row.apply(to_float(v.values[j]));
    store_values(p.q + blockIdx.x * p.hidden + i, values);
  }
}

}  // namespace

void quantize_int8(const QuantizeInt8Params& p, void* stream) {
  dispatch_cuda(p.dtype, [&]<class T>(T) {
    constexpr int kVector = kVectorElements<T>;
    const bool vectorised = p.hidden % kVector == 0 && vector_aligned(p.x, p.q);
    const RowPlan plan = plan_row(p.rows, p.hidden, vectorised ? kVector : 1, kWarpSize * sizeof(uint32_t));
    const auto kernel = vectorised ? quantize_int8_kernel<T, kVector> : quantize_int8_kernel<T, 1>;
    launch("quantize_int8", kernel, plan.launch, stream, p);
  });
}

}  // namespace fastinfer::cuda
