// One token per row of logits: greedy, or drawn after temperature, min-p, top-k and top-p.
#pragma once

#include <cstdint>

#include "common/cpu/isa.h"

namespace fastinfer {

struct SampleParams {
  const float* logits;       // [rows, vocab]
  const float* temperature;  // [rows], 0 is greedy
  const int32_t* top_k;      // [rows], 0 is off
  const float* top_p;        // [rows], 1 is off
  const float* min_p;        // [rows], 0 is off
  const int64_t* seeds;      // [rows]
  const int64_t* positions;  // [rows]
  int64_t* tokens;           // [rows]
  float* logprobs;           // [rows], under the unmodified logits
  int64_t rows;
  int64_t vocab;
};

}  // namespace fastinfer

FASTINFER_CPU_KERNEL(sample, SampleParams)
