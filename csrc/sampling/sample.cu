// Sampling on the GPU. A row's parts are read at the same time, each by a block, which holds its part in registers: it
// finds maximum and normaliser, which is enough for greedy rows, and then lets its tokens race (race.h), or lists the
// likeliest for a filter. The last block of a row draws from what the parts have found.
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

  // Of the weights, which are powers of 2.
  __device__ float scale() const {
    return kLog2e / temperature;
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

// The row with penalties, biases and mask, which `modify` writes.
__device__ SampleRow modified_row(const SampleParams& p, const SamplePlan& plan) {
  SampleRow row = raw_row(p);
  if (p.scratch != nullptr) row.z = p.scratch + blockIdx.x * plan.pitch, row.aligned = true;
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

// Writes this block's part of the modified logits to `scratch`.
__device__ void modify(const SampleParams& p, const SampleRow& own) {
  const SampleRow raw = raw_row(p);
  float* const scratch = const_cast<float*>(own.z);
  for (int token = own.begin + kQuad * static_cast<int>(threadIdx.x); token < own.end; token += kQuad * blockDim.x) {
    store_vector(scratch + token, modified(p, blockIdx.x, token, raw(token), scratch));
  }
}

// The softmax of this block's part at the temperature, and that of the unmodified logits at temperature 1: `raw_sum`,
// which has a thread's already if others are held. If nobody wants log-probabilities, it is the same as `sum`, which
// tells of NaN and infinities as well.
__device__ void survey(SampleBlock& block, const SampleParams& p, const PartQuads& held, float scale,
                       TokenSoftmax& raw_sum, TokenSoftmax& sum) {
  const bool held_are_raw = p.scratch == nullptr;
  const bool same = held_are_raw && (scale == kLog2e || p.logprobs == nullptr);
  sum = TokenSoftmax(held, {scale});
  if (held_are_raw && !same) raw_sum = TokenSoftmax(held, {kLog2e});
  sum = sum.over_warp({scale});
  raw_sum = same ? sum : raw_sum.over_warp({kLog2e});
  auto* sums = reinterpret_cast<TokenSoftmax*>(block.exchange());
  if (block.lane == 0) {
    sums[2 * block.warp] = raw_sum;
    sums[2 * block.warp + 1] = sum;
  }
  __syncthreads();
  raw_sum = sum = {};
  if (block.lane < block.warps) raw_sum = sums[2 * block.lane], sum = sums[2 * block.lane + 1];
  sum = sum.over_warp({scale});
  raw_sum = same ? sum : raw_sum.over_warp({kLog2e});
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
                              const PartQuads& held, const TokenSoftmax& raw_sum, const TokenSoftmax& sum) {
  const RowParams params(p, blockIdx.x);  // read again, which spares registers
  SamplePart part{raw_sum.maximum, raw_sum.sum, sum.maximum, sum.sum, sum.token, INT32_MAX, INFINITY, -INFINITY, 0};
  if (params.greedy || !sum.valid()) return part;
  own.maximum = sum.maximum;
  own.likeliest = sum.token;
  const float lowest = lowest_kept(own.maximum, params.temperature, params.min_p);  // that of the row is no lower
  if (params.has_filter()) {
    // Whatever part lists the least far down: the first top_k of the row are listed.
    const int wanted = params.top_k > 0 ? params.top_k : INT32_MAX;
    parts.list(block, held, own.maximum, lowest, wanted, part.floor, part.count);
  } else {
    Race race;
    race_held(block, p, own, held, {lowest, own.end}, race);
    race = block.winner(race);
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
  SampleRow raw = raw_row(p), row = modified_row(p, plan);
  row.scale = params.scale();
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

__global__ void __launch_bounds__(kSampleThreads, 3)
    sample_kernel(const __grid_constant__ SampleParams p, const __grid_constant__ SamplePlan plan) {
  SampleBlock block(plan.candidates);
  grid_dependency_wait();
  SampleRow own = modified_row(p, plan);
  own.begin = static_cast<int>(blockIdx.y) * plan.part_tokens;
  own.end = min(own.begin + plan.part_tokens, own.end);
  TokenSoftmax raw_sum, sum;
  if (p.bias_start != nullptr) scatter_biases(block, p, own);
  if (p.scratch != nullptr) {
    SampleRow raw = raw_row(p);
    raw.end = own.end;
    raw_sum = TokenSoftmax(PartQuads(block, raw, own.begin), {kLog2e});
    modify(p, own);
    __syncthreads();
  }
  const PartQuads held(block, own, own.begin);  // before the parameters: both are on their way at once
  own.scale = RowParams(p, blockIdx.x).scale();
  survey(block, p, held, own.scale, raw_sum, sum);
  grid_dependency_launch();
  if (plan.parts > 1) {
    const SampleParts parts(p, plan);
    if (!parts.write(p, part_of(block, p, parts, own, held, raw_sum, sum))) return;
  }
  finish_row(block, p, plan, raw_sum, sum);
}

}  // namespace

void sample(const SampleParams& p, void* stream) {
  const SamplePlan plan = plan_sample(p.rows, p.vocab, p.scratch != nullptr);
  launch("sample", sample_kernel, plan.launch, stream, p, plan);
}

}  // namespace fastinfer::cuda
