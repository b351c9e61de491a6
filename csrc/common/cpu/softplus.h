// The softplus of vectors.
#pragma once

#include "common/cpu/vec.h"

namespace fastinfer::cpu::FASTINFER_ISA {

// log(1 + exp(x)) = max(x, 0) + log(1 + y), y = exp(-|x|), to within 3 ulp. log(1 + y) is 2 artanh(s), where s is
// y / (2 + y) <= 1 / 3, of which the series has eight terms. NaN of NaN.
FASTINFER_INLINE f32v softplus(f32v x) {
  const f32v y = exp(select(x > 0.0f, -x, x)), s = y / (2.0f + y), square = s * s;
  f32v series = broadcast(1.0f / 15.0f);
  for (const float term : {1.0f / 13.0f, 1.0f / 11.0f, 1.0f / 9.0f, 1.0f / 7.0f, 1.0f / 5.0f, 1.0f / 3.0f, 1.0f}) {
    series = series * square + term;
  }
  return max(f32v{}, x) + 2.0f * s * series;
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
