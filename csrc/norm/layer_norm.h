// LayerNorm: out = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias.
#pragma once

#include <cstdint>

#include "common/api.h"
#include "common/cpu/isa.h"
#include "common/dtype.h"

namespace fastinfer {

struct LayerNormParams {
  const void* x;       // [rows, hidden]
  const void* weight;  // [hidden]
  const void* bias;    // [hidden]
  void* out;           // [rows, hidden]
  int64_t rows;
  int64_t hidden;
  float eps;
  DType dtype;         // of x and out
  DType weight_dtype;  // of weight and bias
};

}  // namespace fastinfer

FASTINFER_CPU_KERNEL(layer_norm, LayerNormParams)

namespace fastinfer::cuda {
FASTINFER_API void layer_norm(const LayerNormParams& params, void* stream);
}
