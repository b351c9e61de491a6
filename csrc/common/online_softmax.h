// Softmax whose logits come one after another or in parts that are merged later. Each part keeps its largest logit and
// the sum of exponentials relative to it (Milakov and Gimelshein, 2018, https://arxiv.org/abs/1805.02867). Attention,
// the merge of attention states and sampling share this type, on GPUs and on the CPU.
#pragma once

#include <cfloat>
#include <cmath>
#include <numbers>

#include "common/dtype.h"

// The exponential may be a device function; without this, nvcc warns that the host's version of the caller calls it.
#if defined(__CUDACC__)
#define FASTINFER_NO_EXEC_CHECK _Pragma("nv_exec_check_disable")
#else
#define FASTINFER_NO_EXEC_CHECK
#endif

namespace fastinfer {

inline constexpr float kLog2e = std::numbers::log2e_v<float>;
inline constexpr float kLn2 = std::numbers::ln2_v<float>;
inline constexpr float kNegInf = -INFINITY;

// `Number` is a float, or a vector of floats where each lane is a softmax of its own. The caller passes the
// exponential: its base and precision are the caller's choice, but must be the same in every call. All functions are
// inlined because a vector must not be passed between code for different instruction sets.
template <class Number>
struct OnlineSoftmax {
  // The largest logit. It starts with a finite number, so that a difference of two maxima is never NaN.
  Number maximum = Number{} - FLT_MAX;
  Number sum = Number{};  // of exp(logit - maximum)

  // Sets the maximum to `larger`, which must be at least the present one. Returns the factor by which the caller must
  // multiply what is relative to the old maximum.
  FASTINFER_NO_EXEC_CHECK
  template <class Exp>
  FASTINFER_HOST_DEVICE __attribute__((always_inline)) Number raise_maximum(Number larger, const Exp& exp) {
    const Number factor = exp(maximum - larger);
    maximum = larger;
    sum *= factor;
    return factor;
  }

  // Adds the sum of a part whose maximum is at most the present one. Returns the factor of that part's values.
  FASTINFER_NO_EXEC_CHECK
  template <class Exp>
  FASTINFER_HOST_DEVICE __attribute__((always_inline)) Number add(const OnlineSoftmax& part, const Exp& exp) {
    const Number factor = exp(part.maximum - maximum);
    sum += part.sum * factor;
    return factor;
  }
};

}  // namespace fastinfer
