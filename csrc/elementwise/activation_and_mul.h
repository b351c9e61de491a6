// Gated activations: out = act(x[..., :d]) * x[..., d:], and activations without a gate: out = act(x).
#pragma once

#include <cstdint>

#include "common/api.h"
#include "common/cpu/isa.h"
#include "common/dtype.h"

namespace fastinfer {

enum class Activation { kNone, kSilu, kGeluTanh, kGelu };

struct ActivationAndMulParams {
  const void* x;  // [rows, 2 * d], gate first; [rows, d] if not gated
  void* out;      // [rows, d]
  int64_t rows;
  int64_t d;
  Activation activation;
  bool gated;
  DType dtype;
};

}  // namespace fastinfer

FASTINFER_CPU_KERNEL(activation_and_mul, ActivationAndMulParams)

namespace fastinfer::cuda {
FASTINFER_API void activation_and_mul(const ActivationAndMulParams& params, void* stream);
}
