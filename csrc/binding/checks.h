// Argument checks of the operators' bindings. Their messages name the operator, the argument, the expected value and
// the actual one. Nothing here knows a kernel.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>

#include "common/cpu/read_ahead.h"
#include "common/dtype.h"
#include "common/text.h"

namespace fastinfer {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline constexpr int64_t kAny = -1;

inline const char* name(ScalarType type) {
  switch (type) {
    case ScalarType::Float: return "float32";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Half: return "float16";
    case ScalarType::Double: return "float64";
    case ScalarType::Byte: return "uint8";
    case ScalarType::Char: return "int8";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    case ScalarType::Bool: return "bool";
    default: return "another dtype";
  }
}

inline std::string format_device(const torch::stable::Device& device) {
  if (device.is_cpu()) return "cpu";
  return device.is_cuda() ? "cuda:" + std::to_string(device.index()) : "another device";
}

template <class Range>
std::string format_shape(const Range& sizes) {
  std::string text = "[";
  for (const int64_t size : sizes) {
    if (text.size() > 1) text += ", ";
    text += size == kAny ? "*" : std::to_string(size);
  }
  return text + "]";
}

// The memory of a contiguous tensor.
inline cpu::Memory memory_of(const Tensor& t) {
  return {t.data_ptr(), static_cast<size_t>(t.numel()) * t.element_size()};
}

// The checks of one operator's call.
class Checks {
 public:
  // All tensors must be on the device of `reference`.
  Checks(const char* op, const Tensor& reference) : op_(op), device_(reference.device()) {}

  template <class... Parts>
  void require(bool condition, const Parts&... parts) const {
    if (!condition) throw std::runtime_error(concatenate(op_, ": ", parts...));
  }

  void shape(const Tensor& t, const char* name, torch::headeronly::IntHeaderOnlyArrayRef expected) const {
    const auto sizes = t.sizes();
    bool fits = sizes.size() == expected.size();
    for (size_t i = 0; fits && i < expected.size(); ++i) {
      fits = expected.begin()[i] == kAny || expected.begin()[i] == sizes[i];
    }
    if (!fits) require(false, name, " must have the shape ", format_shape(expected), ", got ", format_shape(sizes));
    if (t.device() != device_) {
      require(false, name, " must be on the device of the other arguments, ", format_device(device_), ", got ",
              format_device(t.device()));
    }
  }

  void contiguous(const Tensor& t, const char* name) const {
    if (!t.is_contiguous()) require(false, name, " must be contiguous, got strides ", format_shape(t.strides()));
  }

  // Checks that the heads of a token are contiguous; the tokens of [tokens, heads, head_dim] may be any distance apart.
  void rows_contiguous(const Tensor& t, const char* name) const {
    const auto sizes = t.sizes(), strides = t.strides();
    int64_t expected = 1;
    bool fits = true;
    for (size_t i = sizes.size() - 1; i > 0; --i) {
      fits = fits && (sizes[i] == 1 || strides[i] == expected);
      expected *= sizes[i];
    }
    if (!fits && t.numel() > 0) {
      require(false, name, " must be contiguous but for its first dimension, got strides ", format_shape(strides));
    }
  }

  // A tensor that is changed in place must not contain a row twice, as an expanded tensor does.
  void rows_apart(const Tensor& t, const char* name) const {
    const int64_t row = t.size(0) > 0 ? t.numel() / t.size(0) : 0;
    require(t.size(0) <= 1 || t.stride(0) >= row, name,
            " is changed in place and must not overlap itself, got strides ", format_shape(t.strides()));
  }

  void dtype(const Tensor& t, const char* name, ScalarType expected) const {
    const ScalarType got = t.scalar_type();
    if (got != expected) require(false, name, " must be ", fastinfer::name(expected), ", got ", fastinfer::name(got));
  }

  DType float_dtype(const Tensor& t, const char* name) const {
    return float_dtype(t.scalar_type(), name);
  }

  DType float_dtype(ScalarType type, const char* name) const {
    switch (type) {
      case ScalarType::Float: return DType::kFloat32;
      case ScalarType::BFloat16: return DType::kBFloat16;
      case ScalarType::Half: return DType::kFloat16;
      default: break;
    }
    require(false, name, " must be float32, bfloat16 or float16, got ", fastinfer::name(type));
    return DType::kFloat32;
  }

  // Accepts fp32 and the dtype of the activations.
  DType fp32_or(DType activations, const Tensor& t, const char* name) const {
    const DType dtype = float_dtype(t, name);
    require(dtype == DType::kFloat32 || dtype == activations, name,
            " must be float32 or have the dtype of the activations, got ", fastinfer::name(t.scalar_type()));
    return dtype;
  }

 private:
  const char* op_;
  const torch::stable::Device device_;
};

}  // namespace fastinfer
