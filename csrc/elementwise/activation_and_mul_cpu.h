#pragma once

#include "common/cpu/vec.h"
#include "elementwise/activation_and_mul.h"

namespace fastinfer::cpu::FASTINFER_ISA {

FASTINFER_INLINE f32v activate(Activation activation, f32v x) {
  switch (activation) {
    case Activation::kSilu: return silu(x);
    case Activation::kGeluTanh: return gelu_tanh(x);
    case Activation::kGelu: return gelu(x);
    default: return x;
  }
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
