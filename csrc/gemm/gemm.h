// out = epilogue(prologue(x) W^T): linear layers with RMSNorm fused before and bias, gated activation or residual fused
// after. GemmParams is what the products share, whatever their weight; quant/quantized_gemm.h adds packed weights.
#pragma once

#include <cstdint>
#include <limits>

#include "common/api.h"
#include "common/cpu/isa.h"
#include "common/cpu/read_ahead.h"
#include "common/dtype.h"
#include "elementwise/activation_and_mul.h"
#include "gemm/gemm_plan.h"

namespace fastinfer {

// A vector that may be fp32 or have the activations' dtype; data is null where it is absent.
struct VectorArg {
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
};

// The rows of each expert, if the weight is a stack with a slice for each expert (gemm/grouped_gemm.cpp). Expert e
// computes the rows row_ids[start[e]] .. row_ids[start[e + 1] - 1] of the output. A kernel counts rows by their places
// in row_ids, and looks up the rows of x and of the output here. Places before start[0] and from start[experts] on are
// of experts of other ranks.
struct ExpertRows {
  const int32_t* start = nullptr;    // [experts + 1]; null: one weight for all rows
  const int32_t* row_ids = nullptr;  // [m]
  int experts = 1;
  int fan_out = 1;  // rows of the output that read one row of x: row r reads r / fan_out

  FASTINFER_HOST_DEVICE int64_t out_row(int64_t row) const {
    return start == nullptr ? row : row_ids[row];
  }
  FASTINFER_HOST_DEVICE int64_t x_row(int64_t row) const {
    return start == nullptr ? row : row_ids[row] / fan_out;
  }
};

// Of two equal sets of rows, leaves in `before` those that read rows of x before `first`, and in `rest` the others. In
// memory of the calling thread, until its next call.
FASTINFER_API void part_expert_rows(int64_t first, ExpertRows& before, ExpertRows& rest);

struct GemmParams {
  const void* x;          // [m, k], rows x_stride elements apart; [m / fan_out, k] with experts
  const void* residual;   // [m, n] or null
  void* out;              // [m, n], or [m, n / 2] with an activation
  VectorArg norm_weight;  // [k]: x is RMS-normalised first
  VectorArg bias;         // [n]; [experts, n] with experts
  int64_t m;
  int64_t n;
  int64_t k;
  int64_t x_stride;
  float eps;
  Activation activation;  // gated: rows of the weight come as 16 of the gate, 16 of up, ...
  DType dtype;            // of x, residual and out
  cuda::GemmPlan plan{};  // on a GPU, with its scratch memory
  void* workspace = nullptr;
  uint32_t* counters = nullptr;   // [units] where units are cut, zeros before and after the launch
  bool constant_weights = false;  // weight, scales and norm weight were not written by the kernel before
  ExpertRows expert_rows{};
  cpu::Memory weight_memory{};  // the weight, if it is read as a whole
  // Rows of x from this one on are computed in tiles where the CPU has them: tokens of a prompt
  // (binding/prompt_rows.h), or all rows of a product whose tiles have the vectors' bits (quant/w8a8_gemm.h).
  int64_t first_prompt_row = std::numeric_limits<int64_t>::max();
};

struct DenseGemmParams : GemmParams {
  const void* weight;  // [n, k]; of a stack the first slice, which the others follow (also with packed forms)
  DType weight_dtype;
};

inline constexpr int kTileRows = 16;     // rows of a weight that are packed side by side
inline constexpr int kBlockInputs = 32;  // inputs of one block of a packed weight

}  // namespace fastinfer

FASTINFER_CPU_KERNEL_BF16_TILES(gemm, DenseGemmParams)

namespace fastinfer::cuda {
FASTINFER_API void gemm(const DenseGemmParams& params, void* stream);
}  // namespace fastinfer::cuda
