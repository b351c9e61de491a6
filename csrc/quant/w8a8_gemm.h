// out = epilogue(x_scale * weight_scale * (q_x q_w^T)): int8 by int8, one scale per token and one per weight row.
#pragma once

#include "common/api.h"
#include "gemm/gemm.h"
#include "quant/quantized_gemm.h"
#include "quant/w8a8_gemm_plan.h"

namespace fastinfer {

inline constexpr int64_t kMostW8a8Inputs = 131'040;  // a sum of so many products of -128 fits int32

// From so many rows on, all of them are computed in tiles where the CPU has them. A sum of integers is the same in
// tiles and in vectors, so a row's result depends neither on how many there are nor on its role. first_prompt_row is 0
// then, and at least m otherwise.
inline constexpr int64_t kFewestTileRows = 16;

struct W8a8GemmParams : GemmParams {  // x: int8, contiguous; dtype: of residual and out
  QuantizedWeight weight;             // 8 bits, one group
  const float* x_scales;              // [m]
  cuda::W8a8GemmPlan w8a8_plan{};     // on a GPU; its scratch memory is `sums` and `counters`
  int32_t* sums = nullptr;            // [workspace_ints]
};

}  // namespace fastinfer

FASTINFER_CPU_KERNEL_TILES(w8a8_gemm, W8a8GemmParams)

namespace fastinfer::cuda {
FASTINFER_API void w8a8_gemm(const W8a8GemmParams& params, void* stream);
}
