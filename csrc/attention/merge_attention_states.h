// Merges two attentions of the same queries over disjoint positions.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/api.h"
#include "common/cpu/isa.h"
#include "common/dtype.h"
#include "common/online_softmax.h"

namespace fastinfer {

struct MergeAttentionStatesParams {
  const void* a;  // [rows, columns]
  const void* b;
  const float* a_lse;  // [rows], natural logarithm of the sum of exponentials
  const float* b_lse;
  void* out;       // [rows, columns]
  float* out_lse;  // [rows]
  int64_t rows;
  int64_t columns;
  DType dtype;  // of a, b and out
};

// The weights of a row of a and of b in their merged row, and its lse, which is -inf if neither saw a position.
struct MergedState {
  float a, b, lse;
};

FASTINFER_HOST_DEVICE inline MergedState merge_states(float a_lse, float b_lse) {
  if (a_lse == kNegInf && b_lse == kNegInf) return {0.0f, 0.0f, kNegInf};
  const auto exp = [](float x) { return expf(x); };
  OnlineSoftmax<float> softmax{a_lse, 1.0f};
  const float a = softmax.raise_maximum(a_lse < b_lse ? b_lse : a_lse, exp);  // NaN in either shows
  const float b = softmax.add({b_lse, 1.0f}, exp);
  return {a / softmax.sum, b / softmax.sum, softmax.maximum + logf(softmax.sum)};
}

}  // namespace fastinfer

FASTINFER_CPU_KERNEL(merge_attention_states, MergeAttentionStatesParams)

namespace fastinfer::cuda {
FASTINFER_API void merge_attention_states(const MergeAttentionStatesParams& params, void* stream);
}
