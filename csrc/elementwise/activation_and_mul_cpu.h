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

// Comparisons that keep NaN.
FASTINFER_INLINE f32v at_most(f32v limit, f32v x) {
  return select(x > limit, limit, x);
}

FASTINFER_INLINE f32v within(f32v limit, f32v x) {
  return at_most(limit, select(x < -limit, -limit, x));
}

FASTINFER_INLINE f32v activate_and_mul(Activation activation, f32v gate, f32v up) {
  if (activation == Activation::kClampedSwiglu) {
    const f32v limit = broadcast(kSwigluLimit), g = at_most(limit, gate), u = within(limit, up);
    return times_sigmoid(g, kSwigluGain * g) * (u + 1.0f);
  }
  return activate(activation, gate) * up;
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
