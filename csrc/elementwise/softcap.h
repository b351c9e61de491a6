// Soft-capped logits: x = cap * tanh(x / cap), in place.
#pragma once

#include <cstdint>

#include "common/api.h"
#include "common/cpu/isa.h"
#include "common/dtype.h"

namespace fastinfer {

struct SoftcapParams {
  void* x;  // [count]
  int64_t count;
  float cap;
  DType dtype;
};

}  // namespace fastinfer

FASTINFER_CPU_KERNEL(softcap, SoftcapParams)

namespace fastinfer::cuda {
FASTINFER_API void softcap(const SoftcapParams& params, void* stream);
}
