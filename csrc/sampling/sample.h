// One token per row of logits: greedy, or drawn after penalties, bias, mask, temperature, min-p, top-k and top-p.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/api.h"
#include "common/cpu/isa.h"

namespace fastinfer {

struct SampleParams {
  const float* logits;           // [rows, vocab]
  const float* temperature;      // [rows], 0 is greedy
  const int32_t* top_k;          // [rows], 0 is off
  const float* top_p;            // [rows], 1 is off
  const float* min_p;            // [rows], 0 is off
  const int64_t* seeds;          // [rows]
  const int64_t* positions;      // [rows]
  const float* penalties;        // [rows, 3] or null: repetition, presence, frequency
  const int32_t* output_counts;  // [rows, vocab] or null
  const int32_t* prompt_mask;    // [rows, mask_words] or null: bit 1 where the prompt has the token
  const int32_t* mask;           // [rows, mask_words] or null: bit 0 forbids the token
  const int32_t* bias_start;     // [rows + 1] or null: where a row's biases start
  const int32_t* bias_tokens;    // [num_biases]
  const float* bias_values;      // [num_biases]
  int64_t* tokens;               // [rows]
  float* logprobs;               // [rows] or null, under the unmodified logits
  float* top_logprobs;           // [rows, num_logprobs], likewise
  int64_t* top_tokens;           // [rows, num_logprobs]
  float* scratch;                // CUDA: memory of the plan's size, or null
  void* parts;                   // CUDA: memory of the plan's size for what the parts of rows give, or null
  uint32_t* arrived;             // CUDA: [rows], zeros before and after the launch
  int64_t rows;
  int64_t vocab;
  int64_t mask_words;  // ceil(vocab / 32)
  int64_t num_biases;
  int64_t num_logprobs;
};

}  // namespace fastinfer

FASTINFER_CPU_KERNEL(sample, SampleParams)

namespace fastinfer::cuda {
FASTINFER_API void sample(const SampleParams& params, void* stream);
}
