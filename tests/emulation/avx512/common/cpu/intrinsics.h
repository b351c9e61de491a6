// csrc/common/cpu/intrinsics.h for machines without AVX-512: the same functions lane by lane in plain C++, after
// Intel's Software Developer's Manual, volume 2. Everything up to AVX-512 BF16 exists.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "common/cpu/vector_types.h"
#include "common/dtype.h"

#define FASTINFER_AVX2
#define FASTINFER_AVX512_VNNI
#define FASTINFER_AVX512_BF16

namespace fastinfer::cpu::FASTINFER_ISA {

namespace detail {

template <class To, class From>
To from_halves(From v) {
  To floats;
  for (size_t i = 0; i < sizeof(v) / 2; ++i) floats[i] = to_float(Float16{v[i]});
  return floats;
}

template <class To, class From>
To to_halves(From v) {
  To halves;
  for (size_t i = 0; i < sizeof(v) / 4; ++i) halves[i] = from_float<Float16>(v[i]).bits;
  return halves;
}

template <class To, class A, class B>
To maddubs(A a, B b) {
  To sums;
  for (size_t i = 0; i < sizeof(a) / 2; ++i) {
    sums[i] = static_cast<int16_t>(std::clamp(a[2 * i] * b[2 * i] + a[2 * i + 1] * b[2 * i + 1], -32768, 32767));
  }
  return sums;
}

template <class To, class From>
To madd(From a, From b) {
  To sums;
  for (size_t i = 0; i < sizeof(a) / 4; ++i) {
    sums[i] = static_cast<int32_t>(int64_t{a[2 * i]} * b[2 * i] + int64_t{a[2 * i + 1]} * b[2 * i + 1]);
  }
  return sums;
}

template <class Sum, class A, class B>
Sum dpbusd(Sum sum, A a, B b) {
  for (size_t i = 0; i < sizeof(a) / 4; ++i) {
    int64_t wide = sum[i];
    for (size_t j = 4 * i; j < 4 * i + 4; ++j) wide += a[j] * b[j];
    sum[i] = static_cast<int32_t>(wide);  // modulo 2^32
  }
  return sum;
}

template <class V>
V shuffle_bytes(V v, V index) {
  V out;
  for (size_t i = 0; i < sizeof(v); ++i) out[i] = index[i] < 128 ? v[i / 16 * 16 + index[i] % 16] : 0;
  return out;
}

inline float flush(float x) {
  return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x;
}

inline float of_bf16(uint16_t bits) {
  return flush(to_float(BFloat16{bits}));
}

// std::fma rounds to nearest even, once.
template <class Sum, class Pairs>
Sum dpbf16(Sum sum, Pairs a, Pairs b) {
  for (size_t i = 0; i < sizeof(a) / 4; ++i) {
    const float high = flush(std::fma(of_bf16(a[2 * i + 1]), of_bf16(b[2 * i + 1]), flush(sum[i])));
    sum[i] = flush(std::fma(of_bf16(a[2 * i]), of_bf16(b[2 * i]), high));
  }
  return sum;
}

}  // namespace detail

template <class V>
FASTINFER_INLINE V in_register(V v) {
  return v;
}

FASTINFER_INLINE f32x8 max(f32x8 a, f32x8 b) {
  return a > b ? a : b;
}

FASTINFER_INLINE f32x16 max(f32x16 a, f32x16 b) {
  return a > b ? a : b;
}

FASTINFER_INLINE f32x8 min(f32x8 a, f32x8 b) {
  return a < b ? a : b;
}

FASTINFER_INLINE f32x16 min(f32x16 a, f32x16 b) {
  return a < b ? a : b;
}

FASTINFER_INLINE f32x8 half_to_float(u16x8 v) {
  return detail::from_halves<f32x8>(v);
}

FASTINFER_INLINE f32x16 half_to_float(u16x16 v) {
  return detail::from_halves<f32x16>(v);
}

FASTINFER_INLINE u16x8 float_to_half(f32x8 v) {
  return detail::to_halves<u16x8>(v);
}

FASTINFER_INLINE u16x16 float_to_half(f32x16 v) {
  return detail::to_halves<u16x16>(v);
}

FASTINFER_INLINE u32x8 widen(u16x8 v) {
  return __builtin_convertvector(v, u32x8);
}

FASTINFER_INLINE u32x16 widen(u16x16 v) {
  return __builtin_convertvector(v, u32x16);
}

FASTINFER_INLINE i32x8 widen(i8x8 v) {
  return __builtin_convertvector(v, i32x8);
}

FASTINFER_INLINE i32x16 widen(i8x16 v) {
  return __builtin_convertvector(v, i32x16);
}

FASTINFER_INLINE i16x16 maddubs(u8x32 a, i8x32 b) {
  return detail::maddubs<i16x16>(a, b);
}

FASTINFER_INLINE i32x8 madd(i16x16 a, i16x16 b) {
  return detail::madd<i32x8>(a, b);
}

FASTINFER_INLINE i8x32 sign(i8x32 a, i8x32 b) {
  for (size_t i = 0; i < sizeof(a); ++i) a[i] = static_cast<int8_t>(a[i] * ((b[i] > 0) - (b[i] < 0)));
  return a;
}

FASTINFER_INLINE u8x32 shuffle_bytes(u8x32 v, u8x32 index) {
  return detail::shuffle_bytes(v, index);
}

FASTINFER_INLINE u8x64 shuffle_bytes(u8x64 v, u8x64 index) {
  return detail::shuffle_bytes(v, index);
}

FASTINFER_INLINE i32x16 dpbusd(i32x16 sum, u8x64 a, i8x64 b) {
  return detail::dpbusd(sum, a, b);
}

FASTINFER_INLINE i32x16 dpbusd(i32x16 sum, u8x64 a, const int8_t* b) {
  i8x64 broadcast;
  for (size_t i = 0; i < sizeof(a); ++i) broadcast[i] = b[i % 4];
  return detail::dpbusd(sum, a, broadcast);
}

FASTINFER_INLINE f32x8 fused_multiply_add(f32x8 a, f32x8 b, f32x8 c) {
  for (size_t i = 0; i < sizeof(a) / 4; ++i) a[i] = std::fma(a[i], b[i], c[i]);
  return a;
}

FASTINFER_INLINE f32x16 fused_multiply_add(f32x16 a, f32x16 b, f32x16 c) {
  for (size_t i = 0; i < sizeof(a) / 4; ++i) a[i] = std::fma(a[i], b[i], c[i]);
  return a;
}

FASTINFER_INLINE f32x8 dpbf16(f32x8 sum, u16x16 a, u16x16 b) {
  return detail::dpbf16(sum, a, b);
}

FASTINFER_INLINE f32x16 dpbf16(f32x16 sum, u16x32 a, u16x32 b) {
  return detail::dpbf16(sum, a, b);
}

FASTINFER_INLINE u16x32 float_to_bf16(f32x16 low, f32x16 high) {
  u16x32 out;
  for (size_t i = 0; i < sizeof(out) / 2; ++i) {
    const float value = i < 16 ? low[i] : high[i - 16];
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    if ((bits & 0x7f800000u) == 0) bits &= 0x80000000u;
    bits = value != value ? bits | 0x400000u : bits + 0x7fffu + (bits >> 16 & 1);
    out[i] = static_cast<uint16_t>(bits >> 16);
  }
  return out;
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
