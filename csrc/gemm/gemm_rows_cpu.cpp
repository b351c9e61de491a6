// What the CPU's matrix products do with rows before and after the products. Apart from them, because it is the same
// for all forms of weights and would be compiled with each.
#include <algorithm>
#include <type_traits>

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

// Calls fn(std::integral_constant<Activation, ...>), so that fn's loops do not ask which one it is.
template <class Fn>
void with_activation(Activation activation, const Fn& fn) {
  switch (activation) {
    case Activation::kNone: return fn(std::integral_constant<Activation, Activation::kNone>{});
    case Activation::kSilu: return fn(std::integral_constant<Activation, Activation::kSilu>{});
    case Activation::kGeluTanh: return fn(std::integral_constant<Activation, Activation::kGeluTanh>{});
    case Activation::kGelu: return fn(std::integral_constant<Activation, Activation::kGelu>{});
    case Activation::kClampedSwiglu: return fn(std::integral_constant<Activation, Activation::kClampedSwiglu>{});
  }
}

// Copies what it reads for each vector: stores could change `p`, as far as the compiler knows.
template <class T, Activation kActivation>
class Epilogue {
 public:
  Epilogue(const GemmParams& p, int64_t expert, int64_t row0)
      : bias_(p.bias),
        bias_row_(expert * p.n),
        residual_(static_cast<const T*>(p.residual)),
        out_(static_cast<T*>(p.out)),
        row0_(row0),
        last_row_(p.m - 1 - row0),
        rows_(p.expert_rows),
        width_(kGated ? p.n / 2 : p.n) {}

  // One vector of a unit's columns after the other: what they share stays in registers. As many rows probably follow,
  // and where their results go is prefetched: a store that misses the caches holds up all that come after it.
  void finish_unit(const float* sums, int64_t stride, int64_t unit, int64_t rows) const {
    for_each_vector(columns_of(unit, stride), [&](int64_t i, int64_t lanes) {
      const Bias bias = bias_of(unit, stride, i, lanes);
      const int64_t first = unit * unit_columns(stride) + i;
      for (int64_t row = 0; row < rows; ++row) {
        finish_vector(sums + row * stride + i, bias, offset_of(row) + first, lanes);
        const int64_t next = offset_of(std::min(row + rows, last_row_)) + first;
        __builtin_prefetch(out_ + next, 1);
        if (residual_ != nullptr) __builtin_prefetch(residual_ + next);
      }
    });
  }

  // Row after row: many rows are as many pages, and perhaps all in a few sets of the cache.
  void finish_units(const UnitSums& sums, int64_t rows) const {
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t unit = sums.first; unit < sums.first + sums.count; ++unit) {
        const float* const of_row = sums.data + (unit - sums.first) * sums.next + row * sums.stride;
        const int64_t offset = offset_of(row) + unit * unit_columns(sums.stride);
        for_each_vector(columns_of(unit, sums.stride), [&](int64_t i, int64_t lanes) {
          finish_vector(of_row + i, bias_of(unit, sums.stride, i, lanes), offset + i, lanes);
        });
      }
    }
  }

 private:
  static constexpr bool kGated = kActivation != Activation::kNone;

  struct Bias {
    f32v gate, up;
  };

  // `stride`: a unit's rows of the weight.
  static int64_t unit_columns(int64_t stride) {
    return kGated ? kTileRows : stride;
  }
  int64_t columns_of(int64_t unit, int64_t stride) const {
    return std::min(unit_columns(stride), width_ - unit * unit_columns(stride));
  }
  int64_t offset_of(int64_t row) const {
    return rows_.out_row(row0_ + row) * width_;
  }
  FASTINFER_INLINE Bias bias_of(int64_t unit, int64_t stride, int64_t i, int64_t lanes) const {
    const int64_t first = bias_row_ + unit * stride + i;
    return {load_bias(first, lanes), kGated ? load_bias(first + kTileRows, lanes) : f32v{}};
  }
  FASTINFER_INLINE f32v load_bias(int64_t i, int64_t lanes) const {
    if (bias_.data == nullptr) return f32v{};
    return dispatch(bias_.dtype, [&]<class B>(B) { return load_lanes(static_cast<const B*>(bias_.data) + i, lanes); });
  }
  FASTINFER_INLINE void finish_vector(const float* sum, const Bias& bias, int64_t offset, int64_t lanes) const {
    f32v value = load(sum) + bias.gate;
    if constexpr (kGated) value = activate_and_mul(kActivation, value, load(sum + kTileRows) + bias.up);
    if (residual_ != nullptr) value += load_lanes(residual_ + offset, lanes);
    store_lanes(out_ + offset, value, lanes);
  }

  const VectorArg bias_;
  const int64_t bias_row_;
  const T* const residual_;
  T* const out_;
  const int64_t row0_, last_row_;
  const ExpertRows rows_;
  const int64_t width_;
};

}  // namespace

void finish(const GemmParams& p, int64_t expert, const UnitSums& sums, int64_t row0, int64_t rows) {
  dispatch(p.dtype, [&]<class T>(T) {
    with_activation(p.activation, [&](auto activation) {
      const Epilogue<T, activation> epilogue(p, expert, row0);
      sums.count == 1 ? epilogue.finish_unit(sums.data, sums.stride, sums.first, rows)
                      : epilogue.finish_units(sums, rows);
    });
  });
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
