// Merges two attentions of the same queries over disjoint positions.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/api.h"
#include "common/cpu/isa.h"
#include "common/dtype.h"

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

// What a row of a and of b counts, and their lse together; -inf stands for a row that saw nothing.
struct MergedState {
  float a, b, lse;
};

FASTINFER_HOST_DEVICE inline MergedState merge_states(float a_lse, float b_lse) {
  if (a_lse == -INFINITY && b_lse == -INFINITY) return {0.0f, 0.0f, -INFINITY};
  const float maximum = a_lse < b_lse ? b_lse : a_lse;  // NaN in either shows
  const float a = expf(a_lse - maximum), b = expf(b_lse - maximum);
  return {a / (a + b), b / (a + b), maximum + logf(a + b)};
}

}  // namespace fastinfer

FASTINFER_CPU_KERNEL(merge_attention_states, MergeAttentionStatesParams)

namespace fastinfer::cuda {
FASTINFER_API void merge_attention_states(const MergeAttentionStatesParams& params, void* stream);
}
