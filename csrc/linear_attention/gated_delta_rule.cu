// The gated delta rule on the GPU. A warp has eight columns of one head's state, which do not depend on the others, in
// registers: a decode step reads and writes the state once, and a prompt's tokens find it there. Warps wait for each
// other only when the next tokens' keys, queries and gates are prepared. The norm needs all columns of a head: a kernel
// of its own, whose input stays in the L2.
#include "linear_attention/gated_delta_rule.h"

#include "common/cuda/dtype.h"
#include "common/cuda/launch.h"
#include "common/cuda/ptx.h"
#include "common/cuda/reduce.h"
#include "linear_attention/gated_delta_rule_plan.h"
#include "linear_attention/state_block_cuda.h"

namespace fastinfer::cuda {
namespace {

// What a block prepares of some tokens, in shared memory. Rows are padded, so that tokens which a warp prepares lie in
// different banks. With kChannels each channel of a key has a decay.
template <int kRows, bool kChannels>
struct Prepared {
  static constexpr int kLanes = preparing_lanes(kRows), kTokens = prepared_tokens(kRows);
  static constexpr int kColumns = StatePart<kRows>::kBlockColumns;
  float keys[kTokens][kRows + kLanes];     // of length 1
  float queries[kTokens][kRows + kLanes];  // of length 1 / sqrt(key_dim)
  float values[kTokens][kColumns + kLanes];
  float decay[kTokens][kChannels ? kRows + kLanes : 1];
  float beta[kTokens];
  float key_query[kTokens];  // k . q
  int32_t writes[kTokens];
};

// The sum over the lanes that prepare a token.
template <int kLanes>
__device__ float token_sum(float value) {
  for (int offset = kLanes / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(kFullMask, value, offset);
  return value;
}

__device__ float decay_of(const GatedDeltaRuleParams& p, float rate, float step) {
  if (p.decay_bound != 0.0f) return expf(p.decay_bound / (1.0f + expf(-rate * step)));
  const float softplus = fmaxf(step, 0.0f) + log1pf(expf(-fabsf(step)));
  return expf(-rate * softplus);
}

// Prepares the decays of a token's channels, of which a lane has those of its part of the keys; 0 where there is none.
template <class T, int kRows>
__device__ void prepare_decays(const GatedDeltaRuleParams& p, Prepared<kRows, true>& shared, int i, int lane,
                               int64_t token, int64_t head) {
  const int64_t first = token * p.a_stride + head * p.key_dim;
  const bool is_float = p.a_dtype == DType::kFloat32;
  const T* const narrow = static_cast<const T*>(p.a) + (is_float ? 0 : first);
  const float* const wide = static_cast<const float*>(p.a) + (is_float ? first : 0);
  const float* const bias = p.dt_bias + head * p.key_dim;
  const auto is_aligned = [](const void* at) { return reinterpret_cast<uintptr_t>(at) % 16 == 0; };
  const float rate = expf(p.a_log[head]);
#pragma unroll
  for (int j = 0; j < kPreparedElements / 8; ++j) {
    const int at = (j * Prepared<kRows, true>::kLanes + lane) * 8;
    float steps[8] = {}, biases[8] = {}, decays[8] = {};
    if (at < p.key_dim) {
      if (is_float) {
        load_eight(wide + at, is_aligned(wide), steps);
      } else {
        load_eight(narrow + at, is_aligned(narrow), steps);
      }
      load_eight(bias + at, is_aligned(bias), biases);
#pragma unroll
      for (int e = 0; e < 8; ++e) decays[e] = decay_of(p, rate, steps[e] + biases[e]);
    }
    store_values(&shared.decay[i][at], decays);
  }
}

// Threads, numbered from 0, prepare the tokens from `first` on; a warp fills its places with the last one.
template <class T, int kRows, bool kChannels>
__device__ void prepare(const GatedDeltaRuleParams& p, Prepared<kRows, kChannels>& shared, int thread, int64_t head,
                        int64_t first_column, int64_t first, int64_t end) {
  constexpr int kLanes = Prepared<kRows, kChannels>::kLanes;
  const int lane = thread % kLanes, i = thread / kLanes;
  if (first + thread / kWarpSize * (kWarpSize / kLanes) >= end) return;  // the whole warp
  const int64_t token = min(first + i, end - 1);
  const T* const row = static_cast<const T*>(p.qkv) + token * p.qkv_stride;
  const T* const q = row + head / (p.value_heads / p.key_heads) * p.key_dim;
  const T* const k = q + p.key_heads * p.key_dim;
  const T* const v = row + 2 * p.key_heads * p.key_dim + head * p.value_dim + first_column;
  const bool aligned = reinterpret_cast<uintptr_t>(row) % 16 == 0;  // as heads have multiples of 16 elements
  constexpr int kEights = kPreparedElements / 8;
  float query[kEights][8] = {}, key[kEights][8] = {};
#pragma unroll
  for (int j = 0; j < kEights; ++j) {
    const int at = (j * kLanes + lane) * 8;
    if (at >= p.key_dim) continue;
    load_eight(q + at, aligned, query[j]);
    load_eight(k + at, aligned, key[j]);
  }
#pragma unroll
  for (int at = lane; at < shared.kColumns; at += kLanes) {
    const bool exists = first_column + at < p.value_dim;
    shared.values[i][at] = exists ? to_float(v[at]) : 0.0f;
  }
  // Of every fourth element: k . q may be small beside its terms, so that long sums would show.
  float q_squares[4] = {}, k_squares[4] = {}, products[4] = {};
#pragma unroll
  for (int j = 0; j < kEights; ++j) {
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      q_squares[e % 4] += query[j][e] * query[j][e];
      k_squares[e % 4] += key[j][e] * key[j][e];
      products[e % 4] += key[j][e] * query[j][e];
    }
  }
  const auto sum = [](const float (&parts)[4]) {
    return token_sum<kLanes>((parts[0] + parts[1]) + (parts[2] + parts[3]));
  };
  const float q_scale = rsqrtf(sum(q_squares) + kDeltaNormEps) * rsqrtf(static_cast<float>(p.key_dim));
  const float k_scale = rsqrtf(sum(k_squares) + kDeltaNormEps), product = sum(products);
#pragma unroll
  for (int j = 0; j < kEights; ++j) {
    const int at = (j * kLanes + lane) * 8;
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      query[j][e] *= q_scale;
      key[j][e] *= k_scale;
    }
    store_values(&shared.queries[i][at], query[j]);
    store_values(&shared.keys[i][at], key[j]);
  }
  if constexpr (kChannels) prepare_decays<T>(p, shared, i, lane, token, head);
  if (lane != 0) return;
  if constexpr (!kChannels) {
    const float step = load_float_or<T>(p.a, p.a_dtype, token * p.a_stride + head) + p.dt_bias[head];
    shared.decay[i][0] = decay_of(p, expf(p.a_log[head]), step);
  }
  const float write = load_float_or<T>(p.b, p.b_dtype, token * p.b_stride + head);
  shared.beta[i] = p.beta_scale * (1.0f / (1.0f + expf(-write)));
  shared.key_query[i] = product * q_scale * k_scale;
  shared.writes[i] = p.slots.writes[token];
}

template <class T, int kRows, bool kAhead, bool kChannels>
__global__ void __launch_bounds__(kAhead ? 2 * kStateThreads : kStateThreads, kAhead ? 2 : 4)
    gated_delta_rule_kernel(GatedDeltaRuleParams p) {
  using Part = StatePart<kRows>;
  using Tokens = Prepared<kRows, kChannels>;
  grid_dependency_wait();
  grid_dependency_launch();
  const StateBlock<kRows> block(p.slots, p.state, p.value_heads, p.key_dim, p.value_dim);
  if (block.begin >= block.end) return;
  const int summed = Part::first_column() + Part::summed_column();
  float* output = p.outputs + (block.begin * p.value_heads + block.head) * p.value_dim + block.first_column + summed;
  Part part = block.load();
  const auto prepare_tokens = [&](Tokens& shared, int thread, int64_t first) {
    prepare<T>(p, shared, thread, block.head, block.first_column, first, block.end);
  };
  block.template each_prepared<Tokens, kAhead>(prepare_tokens, [&](const Tokens& shared, int tokens) {
    LaneRows key, query;
    Part::load_rows(shared.keys[0], key);
    Part::load_rows(shared.queries[0], query);
    for (int i = 0; i < tokens; ++i, output += p.value_heads * p.value_dim) {
      const float decay = kChannels ? 1.0f : shared.decay[i][0], beta = shared.beta[i],
                  value = shared.values[i][summed];
      const float key_query = shared.key_query[i];
      const int32_t write = shared.writes[i];
      if constexpr (kChannels) {
        LaneRows decays;
        Part::load_rows(shared.decay[i], decays);
        part.scale(decays);
      }
      const LaneColumns key_parts = part.dot(key), query_parts = part.dot(query);
      // The next token's, which is only read where there is one.
      LaneRows next_key;
      const int after = min(i + 1, tokens - 1);
      Part::load_rows(shared.keys[after], next_key);
      Part::load_rows(shared.queries[after], query);
      const float key_sum = Part::sum(key_parts);
      const float d = beta * fmaf(-decay, key_sum, value);
      const float query_sum = Part::sum(query_parts);
      if constexpr (!kChannels) part.scale(decay);
      part.add(key, Part::columns_of(d));
      if (Part::has_sum()) *output = fmaf(d, key_query, decay * query_sum);
      block.store(part, write);
#pragma unroll
      for (int r = 0; r < kLaneRows; ++r) key[r] = next_key[r];
    }
  });
}

// A warp normalises the outputs of one head.
template <class T>
__global__ void __launch_bounds__(kDeltaNorms* kWarpSize) gated_norm_kernel(GatedDeltaRuleParams p) {
  grid_dependency_wait();
  grid_dependency_launch();
  const int lane = threadIdx.x % kWarpSize;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kDeltaNorms + threadIdx.x / kWarpSize;
  const int64_t token = i / p.value_heads, head = i % p.value_heads;
  if (token >= p.tokens) return;
  constexpr int kHeld = kLargestDeltaHead / kWarpSize;
  float o[kHeld], squares = 0.0f;
#pragma unroll
  for (int j = 0; j < kHeld; ++j) {
    const int at = j * kWarpSize + lane;
    o[j] = at < p.value_dim ? p.outputs[i * p.value_dim + at] : 0.0f;
    squares += o[j] * o[j];
  }
  const float scale = rsqrtf(warp_sum(squares) / static_cast<float>(p.value_dim) + p.eps);
  const T* const z = static_cast<const T*>(p.z) + token * p.z_stride + head * p.value_dim;
#pragma unroll
  for (int j = 0; j < kHeld; ++j) {
    const int at = j * kWarpSize + lane;
    if (at >= p.value_dim) break;
    const float gate = to_float(z[at]), weight = load_float_or<T>(p.norm_weight, p.norm_weight_dtype, at);
    const float factor = (p.sigmoid_gate ? 1.0f : gate) / (1.0f + expf(-gate));
    static_cast<T*>(p.out)[i * p.value_dim + at] = from_float<T>(o[j] * scale * weight * factor);
  }
}

}  // namespace

void gated_delta_rule(const GatedDeltaRuleParams& p, void* stream) {
  const auto plan =
      plan_gated_delta_rule(p.slots.seqs, p.tokens, p.value_heads, p.key_dim, p.value_dim, p.channel_decay, p.device);
  dispatch_cuda(p.dtype, [&]<class T>(T) {
    const auto choose = [&]<int kRows, bool kChannels>() {
      return plan.rule.ahead ? gated_delta_rule_kernel<T, kRows, true, kChannels>
                             : gated_delta_rule_kernel<T, kRows, false, kChannels>;
    };
    const auto choose_rows = [&]<bool kChannels>() {
      return plan.rule.rows == 128 ? choose.template operator()<128, kChannels>()
                                   : choose.template operator()<256, kChannels>();
    };
    const auto kernel =
        p.channel_decay ? choose_rows.template operator()<true>() : choose_rows.template operator()<false>();
    launch("gated_delta_rule", kernel, plan.rule.launch, stream, p);
    launch("gated_norm", gated_norm_kernel<T>, plan.norm, stream, p);
  });
}

}  // namespace fastinfer::cuda
