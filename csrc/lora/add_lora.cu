// LoRA on the GPU, after Punica's shrink and expand (https://arxiv.org/abs/2310.18547): a warp computes the product of
// a token with one row of A; then a thread adds up a column of B for eight tokens, reading it once for neighbours with
// the same adapter, as those of a prompt are. No tensor cores: with 8 to 64 rows the matrices' bytes are the work.
#include "lora/add_lora.h"

#include "common/cuda/dtype.h"
#include "common/cuda/launch.h"
#include "common/cuda/ptx.h"
#include "common/cuda/reduce.h"
#include "common/cuda/row.h"
#include "common/cuda/vector_io.h"
#include "lora/add_lora_plan.h"

namespace fastinfer::cuda {
namespace {

constexpr int kQuad = 4;  // elements that a lane takes at a time, where rows allow

// The index of a row's matrices in a and b, -1 where it has none; what is out of range is none.
__device__ int64_t matrix_of(const AddLoraParams& p, int64_t row) {
  const int32_t slot = row < p.m ? p.adapter_ids[row / p.rows_per_token] : -1;
  if (slot < 0 || slot >= p.slots) return -1;
  if (p.expert_ids == nullptr) return slot;
  const int32_t expert = p.expert_ids[row < p.num_expert_ids ? row : row % p.num_expert_ids];
  return expert < 0 || expert >= p.experts ? -1 : slot * p.experts + expert;
}

__device__ int rank_of(const AddLoraParams& p, int64_t matrix) {
  if (matrix < 0) return 0;
  const auto max_rank = static_cast<int>(p.max_rank);
  return p.ranks != nullptr ? max(0, min(p.ranks[matrix], max_rank)) : max_rank;
}

// hidden[token][rank] = norm(x[token]) . a[rank]
template <class T, class W, int kCount>
__global__ void shrink_kernel(AddLoraParams p) {
  grid_dependency_wait();
  grid_dependency_launch();
  const int64_t token = blockIdx.x, matrix = matrix_of(p, token);
  const int rank_count = rank_of(p, matrix), first = blockIdx.y * kLoraRanks;
  if (first >= rank_count) return;
  const T* const x = static_cast<const T*>(p.x) + token / p.rows_per_input * p.x_stride;
  const int lane = threadIdx.x % kWarpSize, rank = first + threadIdx.x / kWarpSize;

  float scale = 1.0f;
  if (p.norm_weight.data != nullptr) {
    float squares = 0.0f;
    for (int64_t i = threadIdx.x * kCount; i < p.in; i += blockDim.x * kCount) {
      float values[kCount];
      load_floats(x + i, values);
      for (int j = 0; j < kCount; ++j) squares += values[j] * values[j];
    }
    squares = block_sum(squares, reinterpret_cast<float*>(dynamic_shared()));
    scale = rsqrtf(squares / static_cast<float>(p.in) + p.eps);
  }
  if (rank >= rank_count) return;

  const W* const a = static_cast<const W*>(p.a) + (matrix * p.max_rank + rank) * p.in;
  float sum = 0.0f;
#pragma unroll 4  // loads at once
  for (int64_t i = lane * kCount; i < p.in; i += kWarpSize * kCount) {
    float values[kCount], weights[kCount];
    load_floats(x + i, values);
    load_floats(a + i, weights);
    if (p.norm_weight.data != nullptr) {
      float norm[kCount];
      if (p.norm_weight.dtype == DType::kFloat32) {
        load_floats(static_cast<const float*>(p.norm_weight.data) + i, norm);
      } else {
        load_floats(static_cast<const T*>(p.norm_weight.data) + i, norm);
      }
      for (int j = 0; j < kCount; ++j) values[j] = values[j] * scale * norm[j];
    }
    for (int j = 0; j < kCount; ++j) sum += values[j] * weights[j];
  }
  sum = warp_sum(sum);
  if (lane == 0) p.hidden[token * p.max_rank + rank] = sum;
}

// y[token][column] += sum over the ranks of hidden[token][rank] b[rank][column]
template <class T, class W>
__global__ void expand_kernel(AddLoraParams p) {
  grid_dependency_wait();
  grid_dependency_launch();
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kLoraTokens;
  const int64_t column = static_cast<int64_t>(blockIdx.y) * kLoraColumns + threadIdx.x;
  if (column >= p.out) return;
  T* const y = static_cast<T*>(p.y) + column / p.run * p.run_stride + column % p.run;

  for (int begin = 0, end = 0; begin < kLoraTokens; begin = end) {
    const int64_t matrix = matrix_of(p, first + begin);
    const int rank_count = rank_of(p, matrix);
    end = begin + 1;
    if (rank_count == 0) continue;
    while (end < kLoraTokens && matrix_of(p, first + end) == matrix) ++end;
    const W* b = static_cast<const W*>(p.b) + matrix * p.max_rank * p.out + column;
    const float* hidden = p.hidden + first * p.max_rank;
    float sums[kLoraTokens] = {};
#pragma unroll 8  // loads at once
    for (int rank = 0; rank < rank_count; ++rank, b += p.out) {
      const float weight = to_float(*b);
#pragma unroll
      for (int t = 0; t < kLoraTokens; ++t) {
        if (t >= begin && t < end) sums[t] += hidden[t * p.max_rank + rank] * weight;
      }
    }
#pragma unroll
    for (int t = 0; t < kLoraTokens; ++t) {
      if (t < begin || t >= end) continue;
      T* const at = y + (first + t) * p.y_stride;
      *at = from_float<T>(to_float(*at) + sums[t]);
    }
  }
}

template <class T, class W>
void launch_both(const AddLoraParams& p, void* stream) {
  const AddLoraPlan plan = plan_add_lora(p.m, p.out, p.max_rank);
  const bool vectorised = p.in % kQuad == 0 && (p.x_stride % kQuad == 0 || p.m <= p.rows_per_input) &&
                          vector_aligned(p.x, p.a, p.norm_weight.data);
  launch("add_lora", vectorised ? shrink_kernel<T, W, kQuad> : shrink_kernel<T, W, 1>, plan.shrink, stream, p);
  launch("add_lora", expand_kernel<T, W>, plan.expand, stream, p);
}

}  // namespace

void add_lora(const AddLoraParams& p, void* stream) {
  dispatch_cuda(p.dtype,
                [&]<class T>(T) { dispatch_cuda(p.weight_dtype, [&]<class W>(W) { launch_both<T, W>(p, stream); }); });
}

}  // namespace fastinfer::cuda
