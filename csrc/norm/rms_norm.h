// RMSNorm, residual add + RMSNorm, either with the result as int8, and RMSNorm + residual add.
#pragma once

#include <cstdint>

#include "common/api.h"
#include "common/cpu/isa.h"
#include "common/dtype.h"

namespace fastinfer {

struct RmsNormParams {
  const void* x;       // [rows, hidden]
  void* residual;      // [rows, hidden] or null: receives residual + x, which is then normalised
  const void* addend;  // [rows, hidden] or null: added to what was normalised; not with scales
  const void* weight;  // [hidden]
  void* out;           // [rows, hidden]
  float* scales;       // [rows] or null: out is then int8, with one scale per row
  int64_t rows;
  int64_t hidden;
  float eps;
  DType dtype;  // of x, residual, addend and out that is not int8
  DType weight_dtype;
  float factor = 1.0f;            // of the result; not with scales
  bool constant_weights = false;  // CUDA: the kernel before has not written the weight
};

}  // namespace fastinfer

FASTINFER_CPU_KERNEL(rms_norm, RmsNormParams)

namespace fastinfer::cuda {
FASTINFER_API void rms_norm(const RmsNormParams& params, void* stream);
}
