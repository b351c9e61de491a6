// all_reduce, the addition of the residual and RMSNorm in one launch: every rank adds up its blocks' rows itself, and
// normalises them from registers. Many rows are summed by all_reduce's two shots and normalised by another kernel. Both
// give the bits of the two operators one after the other.
#include "parallel/all_reduce_add_rms_norm.h"

#include <algorithm>

#include "common/cuda/launch.h"
#include "common/cuda/reduce.h"
#include "norm/rms_norm.h"
#include "norm/rms_norm_plan.h"
#include "parallel/peer_plan.h"
#include "parallel/peer_sum.h"

namespace fastinfer::cuda {
namespace {

constexpr size_t kSharedBytes = kWarpSize * sizeof(float);  // for block_sum

struct PeerNorm {
  parallel::PeerGroup group;
  AllReduceAddRmsNormParams call;
};

// kHeld: vectors of the row that a thread keeps in registers; with 0 it reads the residual again. The weight is there
// before the exchange if it is one vector a thread: more registers than that are taken by the ranks' parts.
template <class T, int kCount, int kHeld>
__global__ void __launch_bounds__(kExchangeThreads) all_reduce_add_rms_norm_kernel(const __grid_constant__ PeerNorm p) {
  constexpr int kSlots = kHeld == 0 ? 1 : kHeld;
  constexpr bool kEarlyWeight = kHeld == 1;
  const AllReduceAddRmsNormParams& call = p.call;
  const int64_t hidden = call.hidden;
  float values[kSlots][kCount], weight[kCount];

  const auto each_vector = [&](auto&& fn) { cuda::each_vector<kCount, kHeld>(hidden, fn); };
  const auto load_weight = [&](int64_t i) {
    if (call.weight_dtype == DType::kFloat32) {
      load_floats(static_cast<const float*>(call.weight) + i, weight);
    } else {
      load_floats(static_cast<const T*>(call.weight) + i, weight);
    }
  };

  if (!call.constant_weights) grid_dependency_wait();
  if constexpr (kEarlyWeight) each_vector([&](int, int64_t i) { load_weight(i); });
  grid_dependency_wait();
  grid_dependency_launch();
  const PeerExchange exchange(p.group, call.sum.rank);
  T* const slot = exchange.slot<T>(call.sum.rank);
  for (int64_t row = blockIdx.x; row < call.rows; row += gridDim.x) {
    const T* const x = static_cast<const T*>(call.sum.x) + row * hidden;
    each_vector([&](int, int64_t i) { store_vector(slot + row * hidden + i, load_vector<kCount>(x + i)); });
  }
  exchange.barrier(0);
  float* const warp_sums = reinterpret_cast<float*>(dynamic_shared());
  for (int64_t row = blockIdx.x; row < call.rows; row += gridDim.x) {
    T* const residual = static_cast<T*>(call.residual) + row * hidden;
    float squares = 0.0f;
    each_vector([&](int v, int64_t i) {
      sum_of_ranks<T>(exchange, p.group.size, row * hidden + i, values[v]);
      auto sum = load_vector<kCount>(residual + i);
      for (int j = 0; j < kCount; ++j) {
        const float rounded = to_float(from_float<T>(values[v][j]));  // as all_reduce's result
        sum.values[j] = from_float<T>(to_float(sum.values[j]) + rounded);
        values[v][j] = to_float(sum.values[j]);
        squares += values[v][j] * values[v][j];
      }
      store_vector(residual + i, sum);
    });
    const float scale = rsqrtf(block_sum(squares, warp_sums) / static_cast<float>(hidden) + call.eps);
    each_vector([&](int v, int64_t i) {
      if constexpr (kHeld == 0) load_floats(residual + i, values[v]);
      if constexpr (!kEarlyWeight) load_weight(i);
      for (int j = 0; j < kCount; ++j) values[v][j] = values[v][j] * scale * weight[j];
      store_values(static_cast<T*>(call.sum.out) + row * hidden + i, values[v]);
    });
    __syncthreads();  // the next row uses warp_sums again
  }
  exchange.end();
}

template <class T>
void launch_rows(const AllReduceAddRmsNormParams& p, void* stream) {
  constexpr int kVector = kVectorElements<T>;
  const bool vectorised = p.hidden % kVector == 0 && vector_aligned(p.residual, p.weight);
  RowPlan plan = plan_row(p.rows, p.hidden, vectorised ? kVector : 1, kSharedBytes);
  plan.launch.grid = std::min<int64_t>(p.rows, parallel::kMaxExchangeBlocks);
  plan.launch.block = std::min(plan.launch.block, kExchangeThreads);
  const auto kernel = !vectorised                ? all_reduce_add_rms_norm_kernel<T, 1, 0>
                      : plan.thread_vectors == 1 ? all_reduce_add_rms_norm_kernel<T, kVector, 1>
                      : plan.thread_vectors == 4 ? all_reduce_add_rms_norm_kernel<T, kVector, 4>
                                                 : all_reduce_add_rms_norm_kernel<T, kVector, 0>;
  launch("all_reduce_add_rms_norm", kernel, plan.launch, stream, PeerNorm{.group = *p.sum.peers, .call = p});
}

}  // namespace

void all_reduce_add_rms_norm(const AllReduceAddRmsNormParams& p, void* stream) {
  check_exchanged("all_reduce_add_rms_norm", p.sum.x, p.sum.out);
  if (p.rows == 0) return;
  dispatch_cuda(p.sum.dtype, [&]<class T>(T) {
    const int64_t bytes = p.sum.elements * static_cast<int64_t>(sizeof(T));
    if (bytes <= std::min(p.sum.peers->slot_bytes, p.sum.peers->one_shot_bytes)) {
      return launch_rows<T>(p, stream);
    }
    all_reduce(p.sum, stream);
    rms_norm(
        {
            .x = p.sum.out,
            .residual = p.residual,
            .addend = nullptr,
            .weight = p.weight,
            .out = p.sum.out,
            .scales = nullptr,
            .rows = p.rows,
            .hidden = p.hidden,
            .eps = p.eps,
            .dtype = p.sum.dtype,
            .weight_dtype = p.weight_dtype,
            .constant_weights = false,
        },
        stream);
  });
}

}  // namespace fastinfer::cuda
