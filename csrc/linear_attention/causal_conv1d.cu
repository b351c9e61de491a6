// The convolution on the GPU: bound by memory, a thread has 16 bytes of a token's channels, and the same of the few
// tokens after it, which share its weights.
//
// A sequence may store a state in the slot that it reads. The first tokens, which need that state, are therefore
// computed by the threads of the very first, and these also store to that slot, whichever token's state it is.
#include "linear_attention/causal_conv1d.h"

#include <algorithm>

#include "common/cuda/launch.h"
#include "common/cuda/ptx.h"
#include "common/cuda/reduce.h"
#include "common/cuda/row.h"

namespace fastinfer::cuda {
namespace {

constexpr int64_t kMostThreads = 128;
// Of kernels of single elements, on a multiprocessor: without it the compiler wants more, and spills registers.
constexpr int kFewestBlocks = 8;
constexpr int64_t kFewTokens = 64, kRun = 8;  // of more tokens, a thread has kRun

template <class T, int kCount, int kKernel, bool kGated>
class Channels {
 public:
  __device__ Channels(const CausalConv1dParams& p, int64_t first) : p_(p), first_(first) {
    p.weight_dtype == DType::kFloat32 ? load_filter<float>() : load_filter<T>();
  }

  __device__ bool exists(int32_t slot) const {
    return slot >= 0 && slot < p_.slots.slots;
  }

  // The first kKernel - 1 tokens of a sequence, and its state in the slot that it reads.
  __device__ void head(int64_t seq, int64_t begin, int64_t end, int64_t write_to_read) {
    Inputs inputs{};
    if (const int32_t read = p_.slots.reads[seq]; exists(read)) {
#pragma unroll
      for (int r = 0; r < kKernel - 1; ++r) inputs[r + 1] = load_vector<kCount>(state_row(read, r));
    }
    for (int64_t token = begin; token < min(begin + kKernel - 1, end); ++token) {
#pragma unroll
      for (int j = 0; j < kKernel - 1; ++j) inputs[j] = inputs[j + 1];
      inputs[kKernel - 1] = load_input(token);
      convolve(token, inputs);
      if (const int32_t write = p_.slots.writes[token]; exists(write)) store_state(write, inputs);
    }
    if (write_to_read < 0) return;
    load_inputs(write_to_read, inputs);
    store_state(p_.slots.reads[seq], inputs);
  }

  // A later token.
  __device__ void token(int64_t seq, int64_t token) {
    Inputs inputs;
    load_inputs(token, inputs);
    convolve(token, inputs);
    const int32_t write = p_.slots.writes[token];
    if (exists(write) && write != p_.slots.reads[seq]) store_state(write, inputs);
  }

 private:
  using Inputs = Vector<T, kCount>[kKernel];  // the oldest first

  template <class W>
  __device__ void load_filter() {
    const W* const weight = static_cast<const W*>(p_.weight) + first_ * kKernel;
    if constexpr (kCount == 1) {
      for (int i = 0; i < kKernel; ++i) weight_[i] = to_float(weight[i]);
    } else {
      load_floats(weight, weight_);
    }
    if (p_.bias != nullptr) load_floats(static_cast<const W*>(p_.bias) + first_, bias_);
  }

  // The token's gate of the inputs, or with `dim` that of the results.
  __device__ Vector<T, kCount> load_gate(int64_t token, int64_t dim = 0) const {
    return load_vector<kCount>(static_cast<const T*>(p_.gates) + token * p_.gates_stride + dim + first_);
  }

  __device__ Vector<T, kCount> load_input(int64_t token) const {
    const T* const x = static_cast<const T*>(p_.x) + token * p_.x_stride + first_;
    if constexpr (!kGated) {
      return load_vector<kCount>(x);
    } else {
      Vector<T, kCount> input = load_vector<kCount>(x);
      const Vector<T, kCount> gate = load_gate(token);
#pragma unroll
      for (int c = 0; c < kCount; ++c) {
        input.values[c] = from_float<T>(to_float(input.values[c]) * to_float(gate.values[c]));
      }
      return input;
    }
  }

  __device__ T* state_row(int32_t slot, int row) const {
    return static_cast<T*>(p_.state) + slot * p_.slots.stride + row * p_.dim + first_;
  }

  __device__ void load_inputs(int64_t token, Inputs& inputs) const {
#pragma unroll
    for (int j = 0; j < kKernel; ++j) inputs[j] = load_input(token - (kKernel - 1) + j);
  }

  __device__ void convolve(int64_t token, const Inputs& inputs) const {
    float sums[kCount];
#pragma unroll
    for (int c = 0; c < kCount; ++c) {
      sums[c] = bias_[c];
#pragma unroll
      for (int j = 0; j < kKernel; ++j) sums[c] += weight_[c * kKernel + j] * to_float(inputs[j].values[c]);
      if constexpr (!kGated) sums[c] = sums[c] / (1.0f + expf(-sums[c]));
    }
    if constexpr (kGated) {
      const Vector<T, kCount> gate = load_gate(token, p_.dim);
#pragma unroll
      for (int c = 0; c < kCount; ++c) sums[c] *= to_float(gate.values[c]);
    }
    store_values(static_cast<T*>(p_.out) + token * p_.dim + first_, sums);
  }

  __device__ void store_state(int32_t slot, const Inputs& inputs) const {
#pragma unroll
    for (int r = 0; r < kKernel - 1; ++r) store_vector(state_row(slot, r), inputs[r + 1]);
  }

  const CausalConv1dParams& p_;
  const int64_t first_;
  float weight_[kCount * kKernel], bias_[kCount] = {};
};

// The sequence of a token: the last one that begins at it or before.
__device__ int64_t sequence_of(const StateSlots& slots, int64_t token) {
  int64_t low = 0, high = slots.seqs;
  while (low + 1 < high) {
    const int64_t middle = (low + high) / 2;
    (slots.query_start[middle] <= token ? low : high) = middle;
  }
  return low;
}

// The token from `begin` on that stores to the slot; -1 for none. The lanes of a warp look together.
__device__ int64_t token_that_writes(const StateSlots& slots, int32_t slot, int64_t begin, int64_t end) {
  int found = -1;
  for (int64_t token = begin + threadIdx.x % kWarpSize; token < end; token += kWarpSize) {
    if (slots.writes[token] == slot) found = static_cast<int>(token);
  }
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    found = max(found, __shfl_xor_sync(kFullMask, found, offset));
  }
  return found;
}

template <class T, int kCount, int kKernel, bool kGated>
__global__ void __launch_bounds__(kMostThreads, kCount == 1 ? kFewestBlocks : 0)
    causal_conv1d_kernel(CausalConv1dParams p, int64_t run) {
  grid_dependency_wait();
  grid_dependency_launch();
  const int64_t thread = static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x;
  const bool has_channels = thread * kCount < p.dim;  // a lane without any looks for tokens with the others
  Channels<T, kCount, kKernel, kGated> channels(p, has_channels ? thread * kCount : 0);
  int64_t seq = sequence_of(p.slots, blockIdx.x * run);
  for (int64_t token = blockIdx.x * run; token < (blockIdx.x + 1) * run; ++token) {
    while (seq + 1 < p.slots.seqs && p.slots.query_start[seq + 1] <= token) ++seq;
    const int64_t begin = p.slots.query_start[seq], end = p.slots.query_start[seq + 1];
    if (token >= end) return;
    if (token == begin) {
      const int32_t read = p.slots.reads[seq];
      const int64_t write = channels.exists(read) ? token_that_writes(p.slots, read, begin + kKernel - 1, end) : -1;
      if (has_channels) channels.head(seq, begin, end, write);
    } else if (token >= begin + kKernel - 1 && has_channels) {
      channels.token(seq, token);
    }
  }
}

template <class T, int kCount, bool kGated>
void launch_channels(const CausalConv1dParams& p, void* stream) {
  const int64_t run = p.tokens > kFewTokens ? kRun : 1;
  const int64_t vectors = (p.dim + kCount - 1) / kCount;
  const int64_t threads = std::min((vectors + 31) / 32 * 32, kMostThreads);
  const LaunchConfig config{.grid = (p.tokens + run - 1) / run,
                            .block = static_cast<unsigned>(threads),
                            .grid_y = static_cast<unsigned>((vectors + threads - 1) / threads),
                            .dependent = true};
  const auto kernel = p.kernel == 2   ? causal_conv1d_kernel<T, kCount, 2, kGated>
                      : p.kernel == 3 ? causal_conv1d_kernel<T, kCount, 3, kGated>
                      : p.kernel == 4 ? causal_conv1d_kernel<T, kCount, 4, kGated>
                                      : causal_conv1d_kernel<T, kCount, 7, kGated>;
  launch("causal_conv1d", kernel, config, stream, p, run);
}

}  // namespace

void causal_conv1d(const CausalConv1dParams& p, void* stream) {
  if (p.dim == 0 || p.slots.seqs == 0) return;
  dispatch_cuda(p.dtype, [&]<class T>(T) {
    constexpr int kVector = kVectorElements<T>;
    const bool rows = p.dim % kVector == 0 && p.x_stride % kVector == 0 && p.gates_stride % kVector == 0 &&
                      p.slots.stride % kVector == 0;
    const bool vectorised = rows && vector_aligned(p.x, p.weight, p.bias, p.gates, p.state, p.out);
    if (p.gates != nullptr) {
      vectorised ? launch_channels<T, kVector, true>(p, stream) : launch_channels<T, 1, true>(p, stream);
    } else {
      vectorised ? launch_channels<T, kVector, false>(p, stream) : launch_channels<T, 1, false>(p, stream);
    }
  });
}

}  // namespace fastinfer::cuda
