// What the CPU's matrix products do with rows before and after the products. Apart from them, because it is the same
// for all forms of weights and would be compiled with each.
#include <algorithm>

#include "elementwise/activation_and_mul_cpu.h"
#include "gemm/gemm_cpu.h"
#include "norm/rms_norm_cpu.h"

namespace fastinfer::cpu::FASTINFER_ISA {

void load_row(const GemmParams& p, int64_t row, float* out) {
  dispatch(p.dtype, [&]<class T>(T) {
    const T* x = static_cast<const T*>(p.x) + p.expert_rows.x_row(row) * p.x_stride;
    if (p.norm_weight.data == nullptr) {
      for_each_vector(p.k, [&](int64_t i, int64_t lanes) { store_lanes(out + i, load_lanes(x + i, lanes), lanes); });
      return;
    }
    dispatch(p.norm_weight.dtype,
             [&]<class W>(W) { rms_norm_row(x, static_cast<const W*>(p.norm_weight.data), p.k, p.eps, out); });
  });
}

FloatRows float_rows(const GemmParams& p) {
  const int64_t stride = (p.k + kLanes - 1) / kLanes * kLanes + 16;
  float* data = scratch_array<float>(kActivations, p.m * stride);
  for_each_row_range(p, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      load_row(p, row, data + row * stride);
      std::fill(data + row * stride + p.k, data + (row + 1) * stride, 0.0f);
    }
  });
  return {data, stride};
}

namespace {

FASTINFER_INLINE f32v load_vector_arg(const VectorArg& arg, int64_t i, int64_t lanes) {
  return dispatch(arg.dtype, [&]<class T>(T) { return load_lanes(static_cast<const T*>(arg.data) + i, lanes); });
}

template <class T>
void epilogue(const GemmParams& p, int64_t expert, int64_t unit, int64_t row0, int rows, const float* sums,
              int sums_stride) {
  const bool gated = p.activation != Activation::kNone;
  const int64_t width = gated ? p.n / 2 : p.n;
  const int64_t unit_columns = gated ? kTileRows : sums_stride;
  const int64_t column0 = unit * unit_columns;
  const int64_t columns = std::min(unit_columns, width - column0);
  for_each_vector(columns, [&](int64_t i, int64_t lanes) {
    f32v bias{}, up_bias{};
    if (p.bias.data != nullptr) {
      const int64_t first = expert * p.n + unit * sums_stride + i;
      bias = load_vector_arg(p.bias, first, lanes);
      if (gated) up_bias = load_vector_arg(p.bias, first + kTileRows, lanes);
    }
    for (int row = 0; row < rows; ++row) {
      const float* sum = sums + row * sums_stride + i;
      const int64_t offset = p.expert_rows.out_row(row0 + row) * width + column0 + i;
      f32v value = load(sum) + bias;
      if (gated) value = activate_and_mul(p.activation, value, load(sum + kTileRows) + up_bias);
      if (p.residual != nullptr) value += load_lanes(static_cast<const T*>(p.residual) + offset, lanes);
      store_lanes(static_cast<T*>(p.out) + offset, value, lanes);
    }
  });
}

}  // namespace

void finish(const GemmParams& p, int64_t expert, int64_t unit, int64_t row0, int rows, const float* sums,
            int sums_stride) {
  dispatch(p.dtype, [&]<class T>(T) { epilogue<T>(p, expert, unit, row0, rows, sums, sums_stride); });
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
