// Vector types and what the kernels do with them, in the compiler's generic vector extension: one source serves every
// instruction set, and only what the extension cannot say is an instruction's wrapper (common/cpu/intrinsics.h).
//
// The portable build uses 16 lanes like AVX-512, so that the 16-lane code is run by the tests of any machine.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <numbers>

#include "common/cpu/intrinsics.h"
#include "common/dtype.h"

namespace fastinfer::cpu::FASTINFER_ISA {

#if defined(FASTINFER_AVX2) && !defined(FASTINFER_AVX512_VNNI)
inline constexpr int kLanes = 8;
#else
inline constexpr int kLanes = 16;
#endif

#define FASTINFER_VECTOR(type, name) typedef type name __attribute__((vector_size(kLanes * 4)))
FASTINFER_VECTOR(float, f32v);
FASTINFER_VECTOR(int32_t, i32v);
FASTINFER_VECTOR(uint32_t, u32v);
FASTINFER_VECTOR(int16_t, i16v);
FASTINFER_VECTOR(uint16_t, u16v);
FASTINFER_VECTOR(int8_t, i8v);
FASTINFER_VECTOR(uint8_t, u8v);
#undef FASTINFER_VECTOR
typedef uint16_t u16half __attribute__((vector_size(kLanes * 2)));

template <class V>
FASTINFER_INLINE V load_as(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof(V));
  return v;
}

template <class V>
FASTINFER_INLINE void store_as(void* p, V v) {
  std::memcpy(p, &v, sizeof(V));
}

FASTINFER_INLINE f32v broadcast(float x) {
  return x - f32v{};  // f32v{} + x would be an addition: -0 + 0 is 0
}

FASTINFER_INLINE f32v select(i32v mask, f32v if_true, f32v if_false) {
  return mask ? if_true : if_false;
}

#if !defined(FASTINFER_AVX2)
FASTINFER_INLINE f32v max(f32v a, f32v b) {
  return select(a > b, a, b);
}

FASTINFER_INLINE f32v min(f32v a, f32v b) {
  return select(a < b, a, b);
}
#endif

FASTINFER_INLINE f32v to_f32(i32v v) {
  return __builtin_convertvector(v, f32v);
}

// ---- loads and stores of kLanes elements, converting to and from fp32 ----

FASTINFER_INLINE f32v load(const float* p) {
  return load_as<f32v>(p);
}

FASTINFER_INLINE f32v load(const BFloat16* p) {
#if defined(FASTINFER_AVX2)
  return (f32v)(widen(load_as<u16half>(p)) << 16);
#else
  return (f32v)(__builtin_convertvector(load_as<u16half>(p), u32v) << 16);
#endif
}

FASTINFER_INLINE f32v load(const Float16* p) {
#if defined(FASTINFER_AVX2)
  return half_to_float(load_as<u16half>(p));
#else
  const u32v bits = __builtin_convertvector(load_as<u16half>(p), u32v);  // to_float(Float16), lane by lane
  const u32v magnitude = (bits & 0x7fffu) << 13;
  const u32v finite = (u32v)((f32v)magnitude * 0x1p112f);
  const u32v special = (u32v)((bits & 0x7c00u) == 0x7c00u);
  return (f32v)(((bits & 0x8000u) << 16) | (special & (magnitude | 0x7f800000u)) | (~special & finite));
#endif
}

FASTINFER_INLINE f32v load(const int8_t* p) {
#if defined(FASTINFER_AVX512_VNNI)
  return to_f32(widen(load_as<i8x16>(p)));
#elif defined(FASTINFER_AVX2)
  return to_f32(widen(load_as<i8x8>(p)));
#else
  typedef int8_t Bytes __attribute__((vector_size(kLanes)));
  return __builtin_convertvector(load_as<Bytes>(p), f32v);
#endif
}

FASTINFER_INLINE void store(float* p, f32v v) {
  store_as(p, v);
}

FASTINFER_INLINE void store(BFloat16* p, f32v v) {
  const u32v bits = (u32v)v;
  const u32v rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const u32v nan = (u32v)(v != v);
  store_as(p, __builtin_convertvector((nan & ((bits >> 16) | 0x40u)) | (~nan & rounded), u16half));
}

FASTINFER_INLINE void store(Float16* p, f32v v) {
#if defined(FASTINFER_AVX2)
  store_as(p, float_to_half(v));
#else
  for (int i = 0; i < kLanes; ++i) p[i] = from_float<Float16>(v[i]);
#endif
}

// The low byte of every lane.
FASTINFER_INLINE void store_bytes(void* p, i32v v) {
#if defined(FASTINFER_AVX2) && !defined(FASTINFER_AVX512_VNNI)
  // Through __builtin_convertvector GCC 12 takes the lanes out one by one.
  const u8x32 order = {0, 4, 8, 12, 16, 20, 24, 28};
  const u8x32 packed = __builtin_shuffle((u8x32)v, order);
  std::memcpy(p, &packed, kLanes);
#else
  typedef int8_t Bytes __attribute__((vector_size(kLanes)));
  store_as(p, __builtin_convertvector(v, Bytes));
#endif
}

// The first `count` < kLanes elements; the rest are zero.
template <class T>
FASTINFER_INLINE f32v load_partial(const T* p, int64_t count) {
  T lanes[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) lanes[i] = p[i];
  return load(lanes);
}

template <class T>
FASTINFER_INLINE void store_partial(T* p, f32v v, int64_t count) {
  T lanes[kLanes];
  store(lanes, v);
  for (int64_t i = 0; i < count; ++i) p[i] = lanes[i];
}

// Calls fn(offset, lanes) over `count` elements in steps of kLanes; only the last step may have fewer lanes.
template <class Fn>
FASTINFER_INLINE void for_each_vector(int64_t count, Fn&& fn) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) fn(i, static_cast<int64_t>(kLanes));
  if (i < count) fn(i, count - i);
}

template <class T>
FASTINFER_INLINE f32v load_lanes(const T* p, int64_t lanes) {
  return lanes == kLanes ? load(p) : load_partial(p, lanes);
}

template <class T>
FASTINFER_INLINE void store_lanes(T* p, f32v v, int64_t lanes) {
  if (lanes == kLanes) {
    store(p, v);
  } else {
    store_partial(p, v, lanes);
  }
}

// ---- reductions: a tree, always in the same order ----

FASTINFER_INLINE float reduce_add(f32v v) {
  float lanes[kLanes];
  store_as(lanes, v);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}

FASTINFER_INLINE float reduce_max(f32v v) {
  float lanes[kLanes];
  store_as(lanes, v);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
  }
  return lanes[0];
}

template <class Fn>
FASTINFER_INLINE int32_t reduce(i32v v, Fn&& combine) {
  i32x8 halves[kLanes / 8];
  std::memcpy(halves, &v, sizeof(v));
  i32x8 h = halves[0];
  if constexpr (kLanes == 16) h = combine(h, halves[1]);
  h = combine(h, __builtin_shuffle(h, (i32x8){4, 5, 6, 7, 0, 1, 2, 3}));  // constants, else GCC builds them anew
  h = combine(h, __builtin_shuffle(h, (i32x8){2, 3, 0, 1, 6, 7, 4, 5}));
  h = combine(h, __builtin_shuffle(h, (i32x8){1, 0, 3, 2, 5, 4, 7, 6}));
  return h[0];
}

FASTINFER_INLINE int32_t reduce_add(i32v v) {
  return reduce(v, [](i32x8 a, i32x8 b) { return a + b; });
}

FASTINFER_INLINE int32_t reduce_max(i32v v) {
  return reduce(v, [](i32x8 a, i32x8 b) { return a > b ? a : b; });
}

// ---- elementary functions ----

// 1.5 * 2^23: adding it leaves the nearest integer in the low mantissa bits.
inline constexpr float kRound = 12582912.0f;

// exp(r), |r| <= ln2 / 2.
FASTINFER_INLINE f32v exp_polynomial(f32v r) {
  f32v poly = broadcast(1.0f / 720.0f);
  poly = poly * r + 1.0f / 120.0f;
  poly = poly * r + 1.0f / 24.0f;
  poly = poly * r + 1.0f / 6.0f;
  poly = poly * r + 0.5f;
  poly = poly * r + 1.0f;
  return poly * r + 1.0f;
}

// exp(x) to within 2 ulp: x = n ln2 + r, a degree-6 polynomial in r, and n added to the exponent. 0 below -87.3 (the
// smallest normal number), infinity above 88.7, NaN of NaN.
FASTINFER_INLINE f32v exp(f32v x) {
  const f32v clamped = min(broadcast(88.0f), max(broadcast(-87.0f), x));  // in this order a NaN stays
  const f32v shifted = clamped * std::numbers::log2e_v<float> + kRound;
  const f32v n = shifted - kRound;
  const f32v poly = exp_polynomial((clamped - n * 0.693359375f) - n * -2.12194440e-4f);
  const f32v result = (f32v)((i32v)poly + ((i32v)shifted << 23));  // the bits of kRound itself are shifted out
  const f32v bounded = select(x > 88.72283f, broadcast(INFINITY), select(x < -87.33654f, f32v{}, result));
  return select(x != x, x, bounded);
}

// y sigmoid(x) = y / (1 + exp(-x)), with exp as above. An x beyond -87 .. 87 counts as the bound, where the sigmoid is
// 1.6e-38 or 1.
FASTINFER_INLINE f32v times_sigmoid(f32v y, f32v x) {
  const f32v bounded = min(broadcast(87.0f), max(broadcast(-87.0f), x));  // in this order a NaN stays
  const f32v shifted = bounded * -std::numbers::log2e_v<float> + kRound;
  const f32v n = shifted - kRound;
  const f32v poly = exp_polynomial(n * -0.693359375f - bounded - n * -2.12194440e-4f);
  return y / (1.0f + (f32v)((i32v)poly + ((i32v)shifted << 23)));  // the bits of kRound itself are shifted out
}

FASTINFER_INLINE f32v sigmoid(f32v x) {
  return times_sigmoid(broadcast(1.0f), x);
}

FASTINFER_INLINE f32v silu(f32v x) {
  return times_sigmoid(x, x);
}

// 0.5 x (1 + tanh(u)) = x sigmoid(2u), with u = sqrt(2 / pi) (x + 0.044715 x^3).
FASTINFER_INLINE f32v gelu_tanh(f32v x) {
  return times_sigmoid(x, x * (1.5957691216f + 0.0713548162f * x * x));
}

FASTINFER_INLINE f32v gelu(f32v x) {
  f32v result;
  for (int i = 0; i < kLanes; ++i) result[i] = 0.5f * x[i] * (1.0f + std::erf(x[i] * 0.70710678f));
  return result;
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
