// Sampling on the GPU: a block per row. One pass finds maximum and normaliser: enough for greedy rows. In a second the
// tokens race (race.h), unless filters have left so few that they are listed.
#include "sampling/sample.h"

#include "common/cuda/launch.h"
#include "common/online_softmax.h"
#include "sampling/race.h"
#include "sampling/sample_filters.h"
#include "sampling/sample_plan.h"
#include "sampling/sample_select_cuda.h"

namespace fastinfer::cuda {
namespace {

// exp(x / temperature), for a scale of log2(e) / temperature.
struct ScaledExp2 {
  float scale;

  __device__ float operator()(float x) const {
    return exp2_approx(x * scale);
  }
};

// The softmax of a growing set of logits, and the first token that has the maximum. NaN and +inf make the sum NaN, -inf
// adds nothing.
struct TokenSoftmax : OnlineSoftmax<float> {
  int token = INT32_MAX;

  __device__ void add_quad(int first, Quad quad, ScaledExp2 exp) {
    const float (&v)[kQuad] = quad.values;
    const float top = fmaxf(fmaxf(v[0], v[1]), fmaxf(v[2], v[3]));
    if (top > maximum || (top == maximum && token == INT32_MAX)) {
      raise_maximum(top, exp);
      token = first + (v[0] == top ? 0 : v[1] == top ? 1 : v[2] == top ? 2 : 3);
    }
    for (int j = 0; j < kQuad; ++j) sum += exp(v[j] - maximum);
  }

  // The sum relative to a larger maximum.
  __device__ float sum_below(float larger, ScaledExp2 exp) const {
    OnlineSoftmax<float> raised = *this;
    raised.raise_maximum(larger, exp);
    return raised.sum;
  }

  // Merges the lanes of a warp; lanes without a value may stay as they began.
  __device__ TokenSoftmax over_warp(ScaledExp2 exp) const {
    TokenSoftmax all;
    all.maximum = warp_max(maximum);
    all.sum = warp_sum(sum_below(all.maximum, exp));
    all.token = maximum == all.maximum ? token : INT32_MAX;
    for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
      all.token = min(all.token, __shfl_xor_sync(kFullMask, all.token, offset));
    }
    return all;
  }

  __device__ bool valid() const {
    return sum > 0.0f && sum < INFINITY;
  }
};

// The row's parameters, made harmless where they are out of range.
struct RowParams {
  float temperature, min_p, top_p;
  int top_k;
  bool greedy;

  __device__ RowParams(const SampleParams& p, int64_t row)
      : temperature(fminf(p.temperature[row], FLT_MAX)),
        min_p(p.min_p[row]),
        top_p(p.top_p[row]),
        top_k(p.top_k[row]),
        greedy(!(p.temperature[row] >= kGreedyTemperature)) {
    if (greedy) temperature = 1.0f;
  }
};

// Writes the row's biases to `scratch`, where the survey finds each beside its logit: a dense row, as a search of the
// list for every token would be slower.
__device__ void scatter_biases(const SampleBlock& block, const SampleParams& p, float* scratch) {
  block.for_each_quad(
      0, static_cast<int>(p.vocab), [](int) { return Quad{}; },
      [&](int token, Quad zeros) { store_vector(scratch + token, zeros); });
  __syncthreads();
  const BiasRange biases(p, blockIdx.x);
  for (int64_t i = biases.begin + threadIdx.x; i < biases.end; i += blockDim.x) {
    if (makes_sense(p, i)) atomicAdd(scratch + p.bias_tokens[i], p.bias_values[i]);
  }
  __syncthreads();
}

__device__ Quad modified(const SampleParams& p, int64_t row, int token, Quad quad, const float* biases) {
  for (int j = 0; j < kQuad && token + j < p.vocab; ++j) {
    float& z = quad.values[j];
    if (p.penalties != nullptr) {
      const bool in_prompt = p.prompt_mask != nullptr && bit_of(p.prompt_mask + row * p.mask_words, token + j);
      const int count = p.output_counts != nullptr ? p.output_counts[row * p.vocab + token + j] : 0;
      z = penalised(z, in_prompt, count, p.penalties + 3 * row);
    }
    if (p.bias_start != nullptr) z += __ldcg(biases + token + j);
    if (p.mask != nullptr && !bit_of(p.mask + row * p.mask_words, token + j)) z = -INFINITY;
  }
  return quad;
}

// Reads a row once: its own TokenSoftmax, and that of the modified row at the temperature, which goes to `scratch` if
// it is another.
__device__ void survey(SampleBlock& block, const SampleParams& p, const SampleRow& raw, float* scratch, float scale,
                       TokenSoftmax& raw_sum, TokenSoftmax& sum) {
  const bool same = scratch == nullptr && scale == kLog2e;
  block.for_each_quad(0, raw.vocab, raw, [&](int token, Quad quad) {
    raw_sum.add_quad(token, quad, {kLog2e});
    if (same) return;
    if (scratch != nullptr) {
      quad = modified(p, blockIdx.x, token, quad, scratch);
      store_vector(scratch + token, quad);
    }
    sum.add_quad(token, quad, {scale});
  });
  raw_sum = raw_sum.over_warp({kLog2e});
  sum = same ? raw_sum : sum.over_warp({scale});
  auto* sums = reinterpret_cast<TokenSoftmax*>(block.exchange());
  if (block.lane == 0) {
    sums[2 * block.warp] = raw_sum;
    sums[2 * block.warp + 1] = sum;
  }
  __syncthreads();
  raw_sum = sum = {};
  if (block.lane < block.warps) raw_sum = sums[2 * block.lane], sum = sums[2 * block.lane + 1];
  raw_sum = raw_sum.over_warp({kLog2e});
  sum = sum.over_warp({scale});
}

__device__ void write_top_logprobs(SampleBlock& block, const SampleParams& p, const SampleRow& raw, float log_sum) {
  const auto count = static_cast<int>(p.num_logprobs);
  SampleSelection selection(block, raw, -FLT_MAX);
  selection.keep_top_k(count);
  for (int rank = threadIdx.x; rank < count; rank += blockDim.x) {
    const bool exists = rank < selection.size();
    const int token = exists ? selection.token(rank) : -1;
    p.top_tokens[blockIdx.x * p.num_logprobs + rank] = token;
    p.top_logprobs[blockIdx.x * p.num_logprobs + rank] = exists ? raw.z[token] - raw.maximum - log_sum : -INFINITY;
  }
}

__global__ void __launch_bounds__(1024)
    sample_kernel(const __grid_constant__ SampleParams p, int max_candidates, int64_t pitch) {
  SampleBlock block(max_candidates);
  const int64_t row_index = blockIdx.x;
  grid_dependency_wait();
  const RowParams params(p, row_index);
  const bool has_scratch = p.scratch != nullptr;
  const auto vocab = static_cast<int>(p.vocab);
  SampleRow raw{p.logits + row_index * p.vocab, vocab, false, kLog2e, 0.0f, 0};
  raw.aligned = reinterpret_cast<uintptr_t>(raw.z) % sizeof(Quad) == 0;
  SampleRow row = raw;
  row.scale = kLog2e / params.temperature;
  float* scratch = has_scratch ? p.scratch + row_index * pitch : nullptr;
  if (has_scratch) row.z = scratch, row.aligned = true;

  if (p.bias_start != nullptr) scatter_biases(block, p, scratch);
  TokenSoftmax raw_sum, sum;
  survey(block, p, raw, scratch, row.scale, raw_sum, sum);
  grid_dependency_launch();
  raw.maximum = raw_sum.maximum;
  row.maximum = sum.maximum;
  row.likeliest = sum.token;
  const float log_sum = logf(raw_sum.sum);
  if (!raw_sum.valid() || !sum.valid()) {
    if (threadIdx.x == 0) {
      p.tokens[row_index] = -1;
      if (p.logprobs != nullptr) p.logprobs[row_index] = NAN;
    }
    for (int rank = threadIdx.x; rank < p.num_logprobs; rank += blockDim.x) {
      p.top_tokens[row_index * p.num_logprobs + rank] = -1;
      p.top_logprobs[row_index * p.num_logprobs + rank] = NAN;
    }
    return;
  }

  int token = sum.token;
  if (!params.greedy) {
    SampleSelection selection(block, row, lowest_kept(row.maximum, params.temperature, params.min_p));
    if (params.top_k > 0) selection.keep_top_k(params.top_k);
    if (params.top_p < 1.0f) selection.keep_top_p(params.top_p);
    token = selection.draw(p);
  }
  if (threadIdx.x == 0) {
    p.tokens[row_index] = token;
    if (p.logprobs != nullptr) p.logprobs[row_index] = raw.z[token] - raw.maximum - log_sum;
  }
  if (p.num_logprobs > 0) write_top_logprobs(block, p, raw, log_sum);
}

}  // namespace

void sample(const SampleParams& p, void* stream) {
  const SamplePlan plan = plan_sample(p.rows, p.vocab, p.scratch != nullptr);
  launch("sample", sample_kernel, plan.launch, stream, p, plan.candidates, plan.pitch);
}

}  // namespace fastinfer::cuda
