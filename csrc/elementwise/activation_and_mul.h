// Gated activations: out = act(x[..., :d]) * x[..., d:], and others: out = act(x), or act(x) times a factor. With a
// limit, the factors are min(act(x), limit), and up within -limit .. limit.
#pragma once

#include <cstdint>

#include "common/api.h"
#include "common/cpu/isa.h"
#include "common/dtype.h"

namespace fastinfer {

// kClampedSwiglu has a gate always: g sigmoid(1.702 g) (u + 1), with g at most 7 and u in -7 .. 7.
enum class Activation { kNone, kSilu, kGeluTanh, kGelu, kClampedSwiglu };

inline constexpr float kSwigluLimit = 7.0f, kSwigluGain = 1.702f;

struct ActivationAndMulParams {
  const void* x;   // [rows, d], rows x_stride elements apart
  const void* up;  // [rows, d], rows up_stride elements apart; or null for act(x) alone
  void* out;       // [rows, d]
  int64_t rows;
  int64_t d;
  int64_t x_stride;
  int64_t up_stride;
  Activation activation;
  float limit = 0.0f;  // of both factors, where up is not null; 0 for none
  DType dtype;
};

}  // namespace fastinfer

FASTINFER_CPU_KERNEL(activation_and_mul, ActivationAndMulParams)

namespace fastinfer::cuda {
FASTINFER_API void activation_and_mul(const ActivationAndMulParams& params, void* stream);
}
