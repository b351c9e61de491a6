// Rows of activations as int8 with one scale each, for integer products.
#pragma once

#include <cstdint>

#include "common/api.h"
#include "common/cpu/isa.h"
#include "common/dtype.h"

namespace fastinfer {

struct QuantizeInt8Params {
  const void* x;  // [rows, hidden]
  int8_t* q;      // [rows, hidden]
  float* scales;  // [rows]
  int64_t rows;
  int64_t hidden;
  DType dtype;  // of x
};

}  // namespace fastinfer

FASTINFER_CPU_KERNEL(quantize_int8, QuantizeInt8Params)

namespace fastinfer::cuda {
FASTINFER_API void quantize_int8(const QuantizeInt8Params& params, void* stream);
}
