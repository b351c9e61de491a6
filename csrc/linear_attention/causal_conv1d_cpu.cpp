// A unit of work is a block of channels of all sequences: its weights are transposed once, and a token's inputs are in
// the cache when the tokens after it need them.
#include <algorithm>
#include <cstring>

#include "common/cpu/parallel.h"
#include "common/cpu/vec.h"
#include "linear_attention/causal_conv1d.h"

namespace fastinfer::cpu::FASTINFER_ISA {
namespace {

constexpr int64_t kChannels = 128;

// The weights and the bias of a block of channels.
template <int kKernel>
struct Filter {
  alignas(64) float weight[kKernel][kChannels] = {};
  alignas(64) float bias[kChannels] = {};

  template <class W>
  void load_block(const CausalConv1dParams& p, int64_t first, int64_t count) {
    alignas(64) float rows[kKernel * kChannels];
    const W* source = static_cast<const W*>(p.weight) + first * kKernel;
    for_each_vector(count * kKernel, [&](int64_t i, int64_t lanes) { store(rows + i, load_lanes(source + i, lanes)); });
    for (int64_t c = 0; c < count; ++c) {
      for (int j = 0; j < kKernel; ++j) weight[j][c] = rows[c * kKernel + j];
    }
    if (p.bias == nullptr) return;
    const W* bias_source = static_cast<const W*>(p.bias) + first;
    for_each_vector(count, [&](int64_t i, int64_t lanes) { store(bias + i, load_lanes(bias_source + i, lanes)); });
  }
};

// The input u = gate x of a token's channels, of which as many tokens as the filter is long are kept.
template <int kKernel, class T>
struct GatedInputs {
  alignas(64) T rows[kKernel][kChannels];

  const T* at(int64_t token) const {
    return rows[token % kKernel];
  }

  void compute(const CausalConv1dParams& p, int64_t token, int64_t first, int64_t count) {
    const T* x = static_cast<const T*>(p.x) + token * p.x_stride + first;
    const T* gate = static_cast<const T*>(p.gates) + token * p.gates_stride + first;
    T* row = rows[token % kKernel];
    for_each_vector(count, [&](int64_t i, int64_t lanes) {
      store_lanes(row + i, load_lanes(x + i, lanes) * load_lanes(gate + i, lanes), lanes);
    });
  }
};

template <int kKernel, class T>
void run_sequence(const CausalConv1dParams& p, const Filter<kKernel>& filter, int64_t seq, int64_t first,
                  int64_t count) {
  const int64_t begin = p.slots.query_start[seq], end = p.slots.query_start[seq + 1];
  if (begin == end) return;
  const auto state_rows = [&](int64_t slot) { return static_cast<T*>(p.state) + slot * p.slots.stride + first; };
  // A copy, because the sequence may write the slot that it reads.
  alignas(64) T before[kKernel - 1][kChannels] = {};
  if (p.slots.reads[seq] >= 0) {
    const T* rows = state_rows(p.slots.reads[seq]);
    for (int r = 0; r < kKernel - 1; ++r) std::memcpy(before[r], rows + r * p.dim, count * sizeof(T));
  }
  GatedInputs<kKernel, T> gated;
  for (int64_t token = begin; token < end; ++token) {
    if (p.gates != nullptr) gated.compute(p, token, first, count);
    const T* inputs[kKernel];  // the oldest first
    for (int j = 0; j < kKernel; ++j) {
      const int64_t at = token - (kKernel - 1) + j;
      if (at < begin) {
        inputs[j] = before[at - begin + kKernel - 1];
      } else {
        inputs[j] = p.gates != nullptr ? gated.at(at) : static_cast<const T*>(p.x) + at * p.x_stride + first;
      }
    }
    const T* gate = nullptr;
    if (p.gates != nullptr) gate = static_cast<const T*>(p.gates) + token * p.gates_stride + p.dim + first;
    T* out = static_cast<T*>(p.out) + token * p.dim + first;
    for_each_vector(count, [&](int64_t i, int64_t lanes) {
      f32v sum = load(filter.bias + i);
#pragma GCC unroll 7
      for (int j = 0; j < kKernel; ++j) sum += load(filter.weight[j] + i) * load_lanes(inputs[j] + i, lanes);
      store_lanes(out + i, p.gates != nullptr ? load_lanes(gate + i, lanes) * sum : silu(sum), lanes);
    });
    if (p.slots.writes[token] < 0) continue;
    T* rows = state_rows(p.slots.writes[token]);
    for (int r = 0; r < kKernel - 1; ++r) std::memcpy(rows + r * p.dim, inputs[r + 1], count * sizeof(T));
  }
}

template <int kKernel>
void run(const CausalConv1dParams& p) {
  dispatch(p.dtype, [&]<class T>(T) {
    dispatch(p.weight_dtype, [&]<class W>(W) {
      parallel_for((p.dim + kChannels - 1) / kChannels, [&](int64_t begin, int64_t end) {
        for (int64_t block = begin; block < end; ++block) {
          const int64_t first = block * kChannels, count = std::min(kChannels, p.dim - first);
          Filter<kKernel> filter;
          filter.template load_block<W>(p, first, count);
          for (int64_t seq = 0; seq < p.slots.seqs; ++seq) run_sequence<kKernel, T>(p, filter, seq, first, count);
        }
      });
    });
  });
}

}  // namespace

void causal_conv1d(const CausalConv1dParams& p) {
  switch (p.kernel) {
    case 2: return run<2>(p);
    case 3: return run<3>(p);
    case 4: return run<4>(p);
    default: return run<7>(p);
  }
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
