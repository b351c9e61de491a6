#include "attention/merge_attention_states.h"

#include "common/cuda/dtype.h"
#include "common/cuda/launch.h"
#include "common/cuda/ptx.h"
#include "common/cuda/vector_io.h"

namespace fastinfer::cuda {
namespace {

constexpr int kThreads = 128;

// A thread per kCount columns of a row.
template <class T, int kCount>
__global__ void merge_attention_states_kernel(const __grid_constant__ MergeAttentionStatesParams p) {
  grid_dependency_wait();
  grid_dependency_launch();
  const int64_t vectors = p.columns / kCount, vector = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (vector >= p.rows * vectors) return;
  const int64_t row = vector / vectors;
  const MergedState state = merge_states(p.a_lse[row], p.b_lse[row]);
  const auto a = load_vector<kCount>(static_cast<const T*>(p.a) + vector * kCount);
  const auto b = load_vector<kCount>(static_cast<const T*>(p.b) + vector * kCount);
  Vector<T, kCount> out;
  for (int i = 0; i < kCount; ++i) {
    float sum = 0.0f;  // a state that counts nothing adds nothing, whatever it holds
    if (state.a != 0.0f) sum += state.a * to_float(a.values[i]);
    if (state.b != 0.0f) sum += state.b * to_float(b.values[i]);
    out.values[i] = from_float<T>(sum);
  }
  store_vector(static_cast<T*>(p.out) + vector * kCount, out);
  if (vector % vectors == 0) p.out_lse[row] = state.lse;
}

}  // namespace

void merge_attention_states(const MergeAttentionStatesParams& p, void* stream) {
  dispatch_cuda(p.dtype, [&]<class T>(T) {
    const auto run = [&]<int kCount>() {
      const int64_t vectors = p.rows * (p.columns / kCount);
      launch("merge_attention_states", merge_attention_states_kernel<T, kCount>,
             {.grid = (vectors + kThreads - 1) / kThreads, .block = kThreads, .dependent = true}, stream, p);
    };
    const bool vectorised = p.columns % kVectorElements<T> == 0 && vector_aligned(p.a, p.b, p.out);
    vectorised ? run.template operator()<kVectorElements<T>>() : run.template operator()<1>();
  });
}

}  // namespace fastinfer::cuda
