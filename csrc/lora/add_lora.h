// y += (norm(x) A^T) B with the matrices of each token's own adapter: LoRA for batches that mix adapters.
#pragma once

#include <cstdint>
#include <limits>

#include "common/api.h"
#include "common/cpu/isa.h"
#include "common/dtype.h"
#include "gemm/gemm.h"

namespace fastinfer {

struct AddLoraParams {
  void* y;                     // [m, out], rows y_stride apart; within a row runs of `run`, run_stride apart
  const void* x;               // [m / rows_per_input, in], rows x_stride apart
  const void* a;               // [slots * experts, max_rank, in]
  const void* b;               // [slots * experts, max_rank, out]
  const int32_t* adapter_ids;  // [m / rows_per_token]: a slot, or -1 for none
  const int32_t* expert_ids;   // [m] or [rows_per_token], or null: each row's expert
  const int32_t* ranks;        // [slots * experts] or null: how many of the max_rank rows of a and b there are
  VectorArg norm_weight;       // [in]: x is RMS-normalised first
  float* hidden;               // CUDA: [m, max_rank]
  int64_t m;
  int64_t rows_per_token;
  int64_t rows_per_input;
  int64_t in;
  int64_t out;
  int64_t slots;
  int64_t experts;         // 1 without expert_ids
  int64_t num_expert_ids;  // length of expert_ids, which the rows take in turns
  int64_t max_rank;
  int64_t x_stride;
  int64_t y_stride;
  int64_t run;  // a multiple of 16, or `out`
  int64_t run_stride;
  float eps;
  DType dtype;         // of y and x
  DType weight_dtype;  // of a and b
  // Rows of y from this one on are of a prompt's tokens: in tiles where the CPU has them (binding/prompt_rows.h).
  int64_t first_prompt_row = std::numeric_limits<int64_t>::max();
};

}  // namespace fastinfer

FASTINFER_CPU_KERNEL_TILES(add_lora, AddLoraParams)

namespace fastinfer::cuda {
FASTINFER_API void add_lora(const AddLoraParams& params, void* stream);
}
