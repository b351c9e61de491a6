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

FASTINFER_INLINE f32v activate_and_mul(Activation activation, f32v gate, f32v up) {
  if (activation == Activation::kClampedSwiglu) {  // comparisons that keep NaN
    const f32v limit = broadcast(kSwigluLimit);
    const f32v g = select(gate > limit, limit, gate), u = select(up > limit, limit, select(up < -limit, -limit, up));
    return times_sigmoid(g, kSwigluGain * g) * (u + 1.0f);
  }
  return activate(activation, gate) * up;
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
