// A row of logits as a block reads it.
#pragma once

#include "common/online_softmax.h"
#include "sampling/sample_block_cuda.h"
#include "sampling/sample_filters.h"

namespace fastinfer::cuda {

// The tokens begin .. end - 1 of a row of logits, modified or not.
struct SampleRow {
  const float* z;
  int begin, end;
  bool aligned;  // to 16 bytes
  float scale;   // log2(e) / temperature
  float maximum;
  int likeliest;  // the first token that has the maximum

  __device__ Quad wide(int token) const {
    const float4 v = __ldcg(reinterpret_cast<const float4*>(z + token));  // the L1 is too small for a row
    return {v.x, v.y, v.z, v.w};
  }

  // Logits of four tokens, -inf past the row's end.
  __device__ Quad operator()(int token) const {
    if (aligned && token + kQuad <= end) return wide(token);
    Quad quad;
    for (int j = 0; j < kQuad; ++j) quad.values[j] = token + j < end ? __ldcg(z + token + j) : -INFINITY;
    return quad;
  }

  __device__ float weight(float value) const {
    return exp2_approx((value - maximum) * scale);
  }
};

__device__ inline float top_of(const Quad& quad) {
  return fmaxf(fmaxf(quad.values[0], quad.values[1]), fmaxf(quad.values[2], quad.values[3]));
}

// The logits of kCount * kQuad tokens for each thread of a block, in registers, a contiguous chunk for each warp; -inf
// past the row's end. All loads are on their way at once.
template <int kCount>
struct HeldQuads {
  Quad quads[kCount];
  int begin;  // the block's first token
  int first;  // that of quads[0]

  __device__ HeldQuads(const SampleBlock& block, const SampleRow& row, int begin)
      : begin(begin), first(begin + block.warp * kCount * kWarpQuads + kQuad * block.lane) {
    const bool wide = row.aligned && row.end % kQuad == 0;
    const int wide_end = wide ? row.end : 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      quads[i] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
      if (token(i) < wide_end) quads[i] = row.wide(token(i));
    }
    if (wide) return;
#pragma unroll
    for (int i = 0; i < kCount * kQuad; ++i) {
      const int place = token(i / kQuad) + i % kQuad;
      if (place < row.end) quads[i / kQuad].values[i % kQuad] = __ldcg(row.z + place);
    }
  }

  // The first token of quads[i].
  __device__ int token(int i) const {
    return first + i * kWarpQuads;
  }

  // The number that a block holds.
  __device__ static int tokens() {
    return kCount * kQuad * static_cast<int>(blockDim.x);
  }
};

// A thread's part of a row, and the quads that it holds at a time when the whole row is read.
using PartQuads = HeldQuads<kPartQuads>;
inline constexpr int kRowQuads = 3;

// Calls fn(token, quad) for all quads of a row, which may go past its end.
template <class Fn>
__device__ void for_each_quad(const SampleBlock& block, const SampleRow& row, Fn&& fn) {
  for (int begin = row.begin; begin < row.end; begin += HeldQuads<kRowQuads>::tokens()) {
    const HeldQuads<kRowQuads> held(block, row, begin);
#pragma unroll
    for (int i = 0; i < kRowQuads; ++i) fn(held.token(i), held.quads[i]);
  }
}

}  // namespace fastinfer::cuda
