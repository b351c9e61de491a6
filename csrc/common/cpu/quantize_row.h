// A row of numbers as bytes with one scale, amax / the largest byte: int8, or e4m3 (a sign, four bits of exponent,
// three of mantissa; up to 448).
#pragma once

#include <bit>
#include <cfloat>

#include "common/cpu/vec.h"

namespace fastinfer::cpu::FASTINFER_ISA {

struct Int8 {
  static constexpr float kLargest = 127.0f;
  int8_t value;
};
struct E4m3 {
  static constexpr float kLargest = 448.0f;
  uint8_t bits;
};

// The product that comes in must not be contracted with the addition that rounds it, or one instruction set would round
// a tie to another neighbour than the next: the bounds stand between them. (They only cut off what fp32 rounded up.)
template <class Q>
FASTINFER_INLINE f32v bounded(f32v v) {
  const f32v largest = broadcast(Q::kLargest);
  return select(v > largest, largest, select(v < -largest, -largest, v));
}

// Rounds half to even.
FASTINFER_INLINE void store(Int8* p, f32v v) {
  const float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low mantissa bits
  const i32v q = (i32v)(bounded<Int8>(v) + kRound) - (i32v)broadcast(kRound);
  store_bytes(p, q);
}

FASTINFER_INLINE void store(E4m3* p, f32v v) {
  const u32v bits = (u32v)bounded<E4m3>(v), sign = (bits >> 24) & 0x80u, magnitude = bits & 0x7fffffffu;
  // Below 2^-6 the steps are 2^-9, the last place of 2^14 in fp32; above, 20 mantissa bits go and the bias shrinks by
  // 120.
  const u32v subnormal = (u32v)((f32v)magnitude + 0x1p14f) - (u32v)broadcast(0x1p14f);
  const u32v normal = (magnitude + 0x7ffffu + ((magnitude >> 20) & 1u) - (120u << 23)) >> 20;
  const u32v small = (u32v)((f32v)magnitude < 0x1p-6f);
  store_bytes(p, (i32v)(sign | (small & subnormal) | (~small & normal)));
}

// The largest magnitude of a row; a NaN if it has one.
template <class X>
FASTINFER_INLINE float largest_magnitude(const X* x, int64_t count) {
  // Magnitudes are compared as integers, which order them like numbers and a NaN above all.
  i32v magnitudes{};
  for_each_vector(count, [&](int64_t i, int64_t lanes) {
    const i32v magnitude = (i32v)load_lanes(x + i, lanes) & 0x7fffffff;
    magnitudes = magnitude > magnitudes ? magnitude : magnitudes;
  });
  int32_t largest = 0;
  for (int i = 0; i < kLanes; ++i) largest = magnitudes[i] > largest ? magnitudes[i] : largest;
  return std::bit_cast<float>(largest);
}

struct RowScale {
  float scale;
  float inverse;  // 0 where the row becomes zeros
};

// Of a row whose largest magnitude is `amax` and becomes `largest`. A row of zeros, or of numbers so small (3e-36) that
// the scale's reciprocal is not finite, becomes zeros with scale 0; one with an infinity or a NaN becomes zeros with
// scale NaN, so that it shows.
FASTINFER_INLINE RowScale row_scale(float amax, float largest) {
  const float inverse = largest / amax;
  if (amax > 0.0f && amax <= FLT_MAX && inverse <= FLT_MAX) return {amax / largest, inverse};
  return {amax <= FLT_MAX ? 0.0f : NAN, 0.0f};
}

// Returns the scale.
template <class Q, class X>
FASTINFER_INLINE float quantize_row(const X* x, int64_t count, Q* out) {
  const RowScale row = row_scale(largest_magnitude(x, count), Q::kLargest);
  if (row.inverse == 0.0f) {
    for_each_vector(count, [&](int64_t i, int64_t lanes) { store_lanes(out + i, f32v{}, lanes); });
  } else {
    for_each_vector(
        count, [&](int64_t i, int64_t lanes) { store_lanes(out + i, load_lanes(x + i, lanes) * row.inverse, lanes); });
  }
  return row.scale;
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
