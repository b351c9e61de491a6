// Values times the sigmoid or the softplus of their gates: out = x * sigmoid(gate), where neighbouring values may share
// a gate.
#pragma once

#include <cstdint>

#include "common/api.h"
#include "common/cpu/isa.h"
#include "common/dtype.h"

namespace fastinfer {

struct SigmoidGateParams {
  const void* x;     // [rows, width]
  const void* gate;  // [rows, width / group_width], rows gate_stride elements apart
  void* out;         // [rows, width]
  int64_t rows;
  int64_t width;
  int64_t group_width = 1;  // neighbouring elements of x with one gate
  int64_t gate_stride;
  bool softplus;  // log(1 + exp(gate)) instead of the sigmoid
  DType dtype;
};

}  // namespace fastinfer

FASTINFER_CPU_KERNEL(sigmoid_gate, SigmoidGateParams)

namespace fastinfer::cuda {
FASTINFER_API void sigmoid_gate(const SigmoidGateParams& params, void* stream);
}
