// What the operators with recurrent states share on the CPU.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "common/cpu/vec.h"

namespace fastinfer::cpu::FASTINFER_ISA {

// A block of columns of a state.
template <class Float>
struct Columns {
  Float* data;
  int64_t stride;  // between rows
};

FASTINFER_INLINE float load_float(const void* p, DType dtype, int64_t i) {
  return dispatch(dtype, [&]<class T>(T) { return to_float(static_cast<const T*>(p)[i]); });
}

FASTINFER_INLINE float softplus(float x) {
  return std::max(x, 0.0f) + std::log1p(std::exp(-std::abs(x)));
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
