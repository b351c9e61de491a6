// Sampling on the GPU. A row's parts are read at the same time, each by a block: once to find maximum and normaliser,
// which is enough for greedy rows, and again where tokens race (race.h) or are listed for a filter. The last block of a
// row draws from what the parts have found.
#include "sampling/sample.h"

#include "common/cuda/launch.h"
#include "sampling/sample_filters.h"
#include "sampling/sample_part_cuda.h"
#include "sampling/sample_plan.h"

namespace fastinfer::cuda {
namespace {

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

  __device__ bool has_filter() const {
    return top_k > 0 || top_p < 1.0f || min_p > 0.0f;
  }
};

// The row as it came, without its maximum.
__device__ SampleRow raw_row(const SampleParams& p) {
  const float* z = p.logits + blockIdx.x * p.vocab;
  const bool aligned = reinterpret_cast<uintptr_t>(z) % sizeof(Quad) == 0;
  return {z, 0, static_cast<int>(p.vocab), aligned, kLog2e, 0.0f, 0};
}

// The row with penalties, biases and mask, which the survey writes, at its temperature.
__device__ SampleRow modified_row(const SampleParams& p, const SamplePlan& plan, const RowParams& params) {
  SampleRow row = raw_row(p);
  if (p.scratch != nullptr) row.z = p.scratch + blockIdx.x * plan.pitch, row.aligned = true;
  row.scale = kLog2e / params.temperature;
  return row;
}

// Writes the biases of this block's part to `scratch`, where the survey finds each beside its logit: a dense row, as a
// search of the list for every token would be slower.
__device__ void scatter_biases(const SampleBlock& block, const SampleParams& p, const SampleRow& own) {
  float* const scratch = const_cast<float*>(own.z);
  block.for_each_quad(
      own.begin, own.end, [](int) { return Quad{}; },
      [&](int token, Quad zeros) { store_vector(scratch + token, zeros); });
  __syncthreads();
  const BiasRange biases(p, blockIdx.x);
  for (int64_t i = biases.begin + threadIdx.x; i < biases.end; i += blockDim.x) {
    if (!makes_sense(p, i) || p.bias_tokens[i] < own.begin || p.bias_tokens[i] >= own.end) continue;
    atomicAdd(scratch + p.bias_tokens[i], p.bias_values[i]);
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

// Reads this block's part once: its own TokenSoftmax, and that of the modified logits at the temperature, which go to
// `scratch` if they are others.
__device__ void survey(SampleBlock& block, const SampleParams& p, const SampleRow& own, TokenSoftmax& raw_sum,
                       TokenSoftmax& sum) {
  const SampleRow raw = raw_row(p);
  float* const scratch = p.scratch != nullptr ? const_cast<float*>(own.z) : nullptr;
  const float scale = own.scale;
  const bool same = scratch == nullptr && scale == kLog2e;
  block.for_each_quad(own.begin, own.end, raw, [&](int token, Quad quad) {
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

// What this block finds in its part, for the last block of the row.
__device__ SamplePart part_of(SampleBlock& block, const SampleParams& p, const SampleParts& parts, SampleRow own,
                              const RowParams& params, const TokenSoftmax& raw_sum, const TokenSoftmax& sum) {
  SamplePart part{raw_sum.maximum, raw_sum.sum, sum.maximum, sum.sum, sum.token, INT32_MAX, INFINITY, -INFINITY, 0};
  if (params.greedy || !sum.valid()) return part;
  own.maximum = sum.maximum;
  own.likeliest = sum.token;
  const float lowest = lowest_kept(own.maximum, params.temperature, params.min_p);  // that of the row is no lower
  if (params.has_filter()) {
    // Twice top_k, so that whatever part lists the least far down, the first top_k of the row are listed.
    const int wanted = params.top_k > 0 && params.top_k < INT32_MAX / 2 ? 2 * params.top_k : INT32_MAX;
    parts.list(block, own, lowest, wanted, part.floor, part.count);
  } else {
    const Race race = SampleSelection(block, own, lowest).draw(p);
    part.race_time = race.time, part.race_token = race.token;
  }
  return part;
}

// The token of a row that is not greedy.
__device__ int draw_token(SampleBlock& block, const SampleParams& p, const SamplePlan& plan, const SampleRow& row,
                          const RowParams& params, float total) {
  if (plan.parts > 1 && !params.has_filter()) return SampleParts(p, plan).winner(row.maximum, params.temperature);
  const float lowest = lowest_kept(row.maximum, params.temperature, params.min_p);
  SampleSelection selection(block, row, lowest);
  if (plan.parts > 1) SampleParts(p, plan).give(block, selection, lowest);
  if (params.top_k > 0) selection.keep_top_k(params.top_k);
  if (params.top_p < 1.0f) selection.keep_top_p(params.top_p, params.min_p > 0.0f ? 0.0f : total);
  return selection.draw(p).token;
}

__device__ void write_invalid(const SampleParams& p) {
  const int64_t row = blockIdx.x;
  if (threadIdx.x == 0) {
    p.tokens[row] = -1;
    if (p.logprobs != nullptr) p.logprobs[row] = NAN;
  }
  for (int rank = threadIdx.x; rank < p.num_logprobs; rank += blockDim.x) {
    p.top_tokens[row * p.num_logprobs + rank] = -1;
    p.top_logprobs[row * p.num_logprobs + rank] = NAN;
  }
}

// Draws from a row of which all parts have been read. A call, so that nothing of the kernel is kept in registers.
__device__ __attribute__((noinline)) void finish_row(SampleBlock block, const SampleParams& p, const SamplePlan& plan,
                                                     TokenSoftmax raw_sum, TokenSoftmax sum) {
  const RowParams params(p, blockIdx.x);
  SampleRow raw = raw_row(p), row = modified_row(p, plan, params);
  if (plan.parts > 1) SampleParts(p, plan).merge(raw_sum, sum, row.scale);
  if (!raw_sum.valid() || !sum.valid()) return write_invalid(p);
  raw.maximum = raw_sum.maximum;
  row.maximum = sum.maximum;
  row.likeliest = sum.token;
  const int token = params.greedy ? sum.token : draw_token(block, p, plan, row, params, sum.sum);
  const float log_sum = logf(raw_sum.sum);
  if (threadIdx.x == 0) {
    p.tokens[blockIdx.x] = token;
    if (p.logprobs != nullptr) p.logprobs[blockIdx.x] = raw.z[token] - raw.maximum - log_sum;
  }
  if (p.num_logprobs > 0) write_top_logprobs(block, p, raw, log_sum);
}

__global__ void __launch_bounds__(1024)
    sample_kernel(const __grid_constant__ SampleParams p, const __grid_constant__ SamplePlan plan) {
  SampleBlock block(plan.candidates);
  grid_dependency_wait();
  const RowParams params(p, blockIdx.x);
  SampleRow own = modified_row(p, plan, params);
  own.begin = static_cast<int>(blockIdx.y) * plan.part_tokens;
  own.end = min(own.begin + plan.part_tokens, own.end);
  if (p.bias_start != nullptr) scatter_biases(block, p, own);
  TokenSoftmax raw_sum, sum;
  survey(block, p, own, raw_sum, sum);
  grid_dependency_launch();
  if (plan.parts > 1) {
    const SampleParts parts(p, plan);
    if (!parts.write(block, p, part_of(block, p, parts, own, params, raw_sum, sum))) return;
  }
  finish_row(block, p, plan, raw_sum, sum);
}

}  // namespace

void sample(const SampleParams& p, void* stream) {
  const SamplePlan plan = plan_sample(p.rows, p.vocab, p.scratch != nullptr);
  launch("sample", sample_kernel, plan.launch, stream, p, plan);
}

}  // namespace fastinfer::cuda
