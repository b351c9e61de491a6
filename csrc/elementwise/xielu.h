// xIELU: out = positive x^2 + beta x for x > 0, and negative (expm1(min(x, eps)) - x) + beta x elsewhere.
#pragma once

#include <cstdint>

#include "common/api.h"
#include "common/cpu/isa.h"
#include "common/dtype.h"

namespace fastinfer {

struct XieluParams {
  const void* x;  // [count]
  void* out;      // [count], may be x
  int64_t count;
  float positive;
  float negative;
  float beta;
  float eps;  // not above 0
  DType dtype;
};

}  // namespace fastinfer

FASTINFER_CPU_KERNEL(xielu, XieluParams)

namespace fastinfer::cuda {
FASTINFER_API void xielu(const XieluParams& params, void* stream);
}
