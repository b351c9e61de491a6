// Element types as run-time values and as C++ types, without torch.
#pragma once

#include <bit>
#include <cstdint>

#if defined(__CUDACC__)
#define FASTINFER_HOST_DEVICE __host__ __device__
#else
#define FASTINFER_HOST_DEVICE
#endif

namespace fastinfer {

enum class DType { kFloat32, kBFloat16, kFloat16 };

// Storage of 16-bit floats on the host; the CUDA kernels use the toolkit's own types, which have the same bits.
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

inline float to_float(float value) {
  return value;
}

inline float to_float(BFloat16 value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}

// Exact for every input: shift the 10-bit mantissa into fp32's, and let one multiplication by 2^112 repair the
// exponent's bias and normalise subnormals.
inline float to_float(Float16 value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(value.bits & 0x7fffu) << 13;
  const float scaled = std::bit_cast<float>(magnitude) * 0x1p112f;
  const bool special = (value.bits & 0x7c00u) == 0x7c00u;  // infinity or NaN keeps its all-ones exponent
  const uint32_t bits = special ? (magnitude | 0x7f800000u) : std::bit_cast<uint32_t>(scaled);
  return std::bit_cast<float>(sign | bits);
}

template <class T>
T from_float(float value);

template <>
inline float from_float<float>(float value) {
  return value;
}

// Round to nearest even; NaN stays NaN.
template <>
inline BFloat16 from_float<BFloat16>(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if (value != value) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

template <>
inline Float16 from_float<Float16>(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};
  if (magnitude >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // 65520 and up round to infinity
  if (magnitude < 0x38800000u) {  // below 2^-14: adding 0.5 leaves the subnormal's bits, rounded, in the mantissa
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return {static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000u))};
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return {static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13))};
}

// Calls fn with a value of the C++ type that stands for `dtype`.
template <class Fn>
auto dispatch(DType dtype, Fn&& fn) {
  switch (dtype) {
    case DType::kBFloat16: return fn(BFloat16{});
    case DType::kFloat16: return fn(Float16{});
    default: return fn(float{});
  }
}

}  // namespace fastinfer
