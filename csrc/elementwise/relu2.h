// Squared ReLU: out = max(x, 0)^2.
#pragma once

#include <cstdint>

#include "common/api.h"
#include "common/cpu/isa.h"
#include "common/dtype.h"

namespace fastinfer {

struct Relu2Params {
  const void* x;  // [count]
  void* out;      // [count], may be x
  int64_t count;
  DType dtype;
};

}  // namespace fastinfer

FASTINFER_CPU_KERNEL(relu2, Relu2Params)

namespace fastinfer::cuda {
FASTINFER_API void relu2(const Relu2Params& params, void* stream);
}
