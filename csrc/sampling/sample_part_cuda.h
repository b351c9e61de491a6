// What a block finds in its part of a row, and how the last block of the row puts the parts together. If no filter is
// on, each part has a race of its own, and the winner is the first of the parts' winners. With filters a part lists its
// likeliest tokens. The cut of top-k and top-p is usually among them; else the last block looks for it in the whole row
// (sample_select_cuda.h).
#pragma once

#include "common/cuda/arrival.h"
#include "common/online_softmax.h"
#include "sampling/sample_select_cuda.h"

namespace fastinfer::cuda {

// exp(x / temperature), for a scale of log2(e) / temperature.
struct ScaledExp2 {
  float scale;

  __device__ float operator()(float x) const {
    return exp2_approx(x * scale);
  }
};

// The softmax of a set of logits, and the first token that has the maximum. NaN and +inf make the sum NaN, -inf adds
// nothing.
struct TokenSoftmax : OnlineSoftmax<float> {
  int token = INT32_MAX;

  TokenSoftmax() = default;

  __device__ TokenSoftmax(const PartQuads& held, ScaledExp2 exp) {
#pragma unroll
    for (int i = 0; i < kPartQuads; ++i) maximum = fmaxf(maximum, top_of(held.quads[i]));
#pragma unroll
    for (int i = kPartQuads * kQuad - 1; i >= 0; --i) {
      const float value = held.quads[i / kQuad].values[i % kQuad];
      if (value == maximum) token = held.token(i / kQuad) + i % kQuad;
      sum += exp(value - maximum);
    }
  }

  // The sum relative to a larger maximum.
  __device__ float sum_below(float larger, ScaledExp2 exp) const {
    OnlineSoftmax<float> raised = *this;
    raised.raise_maximum(larger, exp);
    return raised.sum;
  }

  __device__ void merge(const TokenSoftmax& other, ScaledExp2 exp) {
    const float larger = fmaxf(maximum, other.maximum);
    token = min(maximum == larger ? token : INT32_MAX, other.maximum == larger ? other.token : INT32_MAX);
    sum = sum_below(larger, exp) + other.sum_below(larger, exp);
    maximum = larger;
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

// The parts of this block's row in the workspace.
class SampleParts {
 public:
  __device__ SampleParts(const SampleParams& p, const SamplePlan& plan)
      : plan_(plan),
        parts_(static_cast<SamplePart*>(p.parts) + static_cast<int64_t>(blockIdx.x) * plan.parts),
        keys_(reinterpret_cast<uint64_t*>(static_cast<SamplePart*>(p.parts) + p.rows * plan.parts) +
              static_cast<int64_t>(blockIdx.x) * plan.parts * plan.part_candidates) {}

  // Writes what this block has found, which all threads know; true in the block that is the row's last.
  __device__ bool write(const SampleParams& p, const SamplePart& part) const {
    if (threadIdx.x == 0) parts_[blockIdx.y] = part;
    return last_to_arrive(p.arrived + blockIdx.x, plan_.parts);
  }

  // Lists the likeliest tokens of this block's part, none below `lowest`, and says how far down and how many: `wanted`,
  // or three quarters of what the memory allows if that is less; fewer only if there are no more, or equal ones.
  __device__ void list(SampleBlock& block, const PartQuads& own, float maximum, float lowest, int wanted, float& floor,
                       int& count) const;

  // Merges what the parts have found. `rows`: at the temperature. Every warp does it for itself.
  __device__ void merge(TokenSoftmax& raw_sum, TokenSoftmax& sum, float scale) const {
    raw_sum = sum = {};
    each_part([&](const SamplePart& part) {
      TokenSoftmax raw_other, other;
      raw_other.maximum = part.raw_maximum, raw_other.sum = part.raw_sum;
      other.maximum = part.maximum, other.sum = part.sum, other.token = part.token;
      raw_sum.merge(raw_other, {kLog2e});
      sum.merge(other, {scale});
    });
    raw_sum = raw_sum.over_warp({kLog2e});
    sum = sum.over_warp({scale});
  }

  // The winner of the row: times of a part's race are relative to the weight of the part's maximum.
  __device__ int winner(float maximum, float temperature) const {
    Race race;
    each_part([&](const SamplePart& part) {
      if (part.race_token == INT32_MAX) return;
      race.add(part.race_time / race_weight(part.maximum, maximum, temperature), part.race_token);
    });
    SampleBlock::merge_races(race);
    return race.token;
  }

  // Hands the listed tokens from `lowest` on to the selection.
  __device__ void give(SampleBlock& block, SampleSelection& selection, float lowest) const {
    float floor = -INFINITY;
    each_part([&](const SamplePart& part) { floor = fmaxf(floor, part.floor); });
    floor = warp_max(floor);
    const uint32_t last_bits = ~ordered_bits(fmaxf(floor, lowest));
    if (threadIdx.x == 0) *block.counter() = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < plan_.parts * plan_.part_candidates; i += blockDim.x) {
      if (i % plan_.part_candidates >= __ldcg(&parts_[i / plan_.part_candidates].count)) continue;
      const uint64_t key = __ldcg(reinterpret_cast<const unsigned long long*>(keys_ + i));
      if (key >> 32 <= last_bits) block.candidates()[atomicAdd(block.counter(), 1)] = key;
    }
    __syncthreads();
    const int size = *block.counter();
    selection.take(size, floor);
  }

 private:
  template <class Fn>
  __device__ void each_part(Fn&& fn) const {
    for (int i = threadIdx.x % kWarpSize; i < plan_.parts; i += kWarpSize) {
      SamplePart part;
      float4 pieces[sizeof part / sizeof(float4)];
      for (size_t j = 0; j < sizeof part / sizeof(float4); ++j) {
        pieces[j] = __ldcg(reinterpret_cast<const float4*>(parts_ + i) + j);
      }
      memcpy(&part, pieces, sizeof part);
      fn(part);
    }
  }

  const SamplePlan& plan_;
  SamplePart* const parts_;
  uint64_t* const keys_;
};

// A floor above which few enough tokens lie is searched by four pivots a round, on values in registers. It is taken
// once that is enough, or as it is after some rounds: equal values cannot be told apart.
__device__ inline void SampleParts::list(SampleBlock& block, const PartQuads& own, float maximum, float lowest,
                                         int wanted, float& floor, int& count) const {
  constexpr int kPivots = 4, kRounds = 16;
  const int enough = min(wanted, max(plan_.part_candidates * 3 / 4, 1));  // 1: so that there is a round
  const int most = min(2 * enough, plan_.part_candidates);
  // The numbers of tokens from each pivot on: 16 bits each, which a part's fit.
  const auto counts_from = [&](const float (&pivot)[kPivots], int (&counts)[kPivots]) {
    unsigned long long packed = 0;
#pragma unroll
    for (int j = 0; j < kPivots; ++j) {
      int own_count = 0;
#pragma unroll
      for (int i = 0; i < kPartQuads * kQuad; ++i) own_count += own.quads[i / kQuad].values[i % kQuad] >= pivot[j];
      packed |= static_cast<unsigned long long>(own_count) << (16 * j);
    }
    const auto over_warp = [](unsigned long long value) {
      for (int offset = kWarpSize / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(kFullMask, value, offset);
      return value;
    };
    auto* const numbers = reinterpret_cast<unsigned long long*>(block.exchange());
    packed = over_warp(packed);
    if (block.lane == 0) numbers[block.warp] = packed;
    __syncthreads();
    packed = over_warp(block.lane < block.warps ? numbers[block.lane] : 0);
    for (int j = 0; j < kPivots; ++j) counts[j] = static_cast<int>(packed >> (16 * j) & 0xffff);
  };

  if (threadIdx.x == 0) *block.counter() = 0;
  float lo = lowest, hi = nextafterf(maximum, INFINITY);  // too many from lo on, few enough from hi on
  int count_hi = 0;
  floor = -INFINITY;
  for (int round = 0; round < kRounds && count_hi < enough; ++round) {
    float pivot[kPivots];
    for (int j = 0; j < kPivots; ++j) {
      const float share = static_cast<float>(j + (round > 0)) / (kPivots + (round > 0));
      pivot[j] = lo * (1.0f - share) + fminf(hi, FLT_MAX) * share;
    }
    int counts[kPivots];
    counts_from(pivot, counts);
    if (round == 0 && counts[0] <= most) {  // pivot 0 is `lowest`
      hi = lowest, count_hi = counts[0];
      break;
    }
    floor = hi;
    for (int j = 0; j < kPivots; ++j) {
      if (counts[j] > most) {
        lo = fmaxf(lo, pivot[j]);
      } else if (pivot[j] < hi) {
        hi = floor = pivot[j], count_hi = counts[j];
      }
    }
  }
  count = count_hi;
#pragma unroll
  for (int i = 0; i < kPartQuads * kQuad; ++i) {
    const float value = own.quads[i / kQuad].values[i % kQuad];
    if (!(value >= hi)) continue;
    const int token = own.token(i / kQuad) + i % kQuad;
    keys_[blockIdx.y * plan_.part_candidates + atomicAdd(block.counter(), 1)] =
        uint64_t{~ordered_bits(value)} << 32 | static_cast<uint32_t>(token);
  }
}

}  // namespace fastinfer::cuda
