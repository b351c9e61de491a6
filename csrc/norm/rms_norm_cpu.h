// RMSNorm of one row, shared by the operator and the prologue of the matrix products.
#pragma once

#include "common/cpu/vec.h"

namespace fastinfer::cpu::FASTINFER_ISA {

// out = x / sqrt(mean(x^2) + eps), times the weight and plus the addend where there is one, times the factor.
// Statistics in fp32; out may be x.
template <class X, class W, class Out>
FASTINFER_INLINE void rms_norm_row(const X* x, const W* weight, int64_t hidden, float eps, Out* out,
                                   const X* addend = nullptr, float factor = 1.0f) {
  f32v squares{};
  for_each_vector(hidden, [&](int64_t i, int64_t lanes) {
    const f32v v = load_lanes(x + i, lanes);
    squares += v * v;
  });
  const f32v scale = broadcast(1.0f / std::sqrt(reduce_add(squares) / static_cast<float>(hidden) + eps));
  for_each_vector(hidden, [&](int64_t i, int64_t lanes) {
    f32v v = load_lanes(x + i, lanes) * scale;
    if (weight != nullptr) v *= load_lanes(weight + i, lanes);
    if (addend != nullptr) v += load_lanes(addend + i, lanes);
    store_lanes(out + i, v * factor, lanes);
  });
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
