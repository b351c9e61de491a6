// The inputs of a gated activation on a GPU. Activation::kClampedSwiglu is silu of clamped inputs with a gain of its
// own: where both share their code, it adds little to kernels with another activation.
#pragma once

#include "elementwise/activation_and_mul.h"

namespace fastinfer::cuda {

struct GatedInputs {
  float gate, up, gain = 1.0f;  // of silu's sigmoid

  __device__ GatedInputs(Activation activation, float g, float u) : gate(g), up(u) {
    if (activation != Activation::kClampedSwiglu) return;
    // Comparisons, unlike fminf and fmaxf, keep NaN.
    gate = g > kSwigluLimit ? kSwigluLimit : g;
    up = 1.0f + (u > kSwigluLimit ? kSwigluLimit : u < -kSwigluLimit ? -kSwigluLimit : u);
    gain = kSwigluGain;
  }
};

}  // namespace fastinfer::cuda
