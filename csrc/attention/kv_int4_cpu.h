// Groups of a head to four bits and back.
#pragma once

#include <algorithm>
#include <cmath>

#include "attention/kv_int4.h"
#include "common/cpu/vec.h"

namespace fastinfer::cpu::FASTINFER_ISA {

struct Int4Pair {
  uint8_t bits;
};

// Scale and minimum are rounded before the codes are, which make up for it. A group with an infinity, a NaN or a number
// that is too large for fp16 gets NaN for both, so that it shows.
inline Int4Scale int4_scale(float lowest, float largest) {
  const Float16 minimum = from_float<Float16>(lowest + 0.0f);  // + 0: -0 becomes 0, here and below
  const Float16 scale = from_float<Float16>((std::max(largest - to_float(minimum), 0.0f) + 0.0f) / kInt4Levels);
  const float top = to_float(minimum) + to_float(scale) * kInt4Levels;
  if (lowest >= -kInt4Limit && top <= kInt4Limit) return {scale, minimum};
  return {from_float<Float16>(NAN), from_float<Float16>(NAN)};
}

// `count` <= kGroup elements, an even number.
template <int kGroup, class X>
FASTINFER_INLINE Int4Scale quantize_int4_group(const X* x, int count, Int4Pair* out) {
  float values[kGroup];
  for_each_vector(count, [&](int64_t i, int64_t lanes) { store(values + i, load_lanes(x + i, lanes)); });
  for (int i = count; i < kGroup; ++i) values[i] = values[0];
  f32v lowest = broadcast(INFINITY), largest = broadcast(-INFINITY);
  for (int i = 0; i < kGroup; i += kLanes) {
    const f32v v = load(values + i);
    const f32v finite = select(((i32v)v & 0x7fffffff) < 0x7f800000, v, broadcast(-INFINITY));
    lowest = select(finite < lowest, finite, lowest), largest = max(finite, largest);
  }
  const Int4Scale scale = int4_scale(-reduce_max(-lowest), reduce_max(largest));
  const float minimum = to_float(scale.minimum), step = to_float(scale.scale);
  const float inverse = step > 0.0f ? 1.0f / step : 0.0f;  // also if it is NaN
  const float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low mantissa bits
  uint8_t codes[kGroup];
  for (int i = 0; i < kGroup; i += kLanes) {
    // The bounds also keep the product and the addition that rounds it apart; NaN becomes 0.
    const f32v v = (load(values + i) - minimum) * inverse, top = broadcast(kInt4Levels);
    const f32v bounded = select(v > 0.0f, select(v > top, top, v), f32v{});
    store_bytes(codes + i, (i32v)(bounded + kRound) - (i32v)broadcast(kRound));
  }
  for (int i = 0; i < count / 2; ++i) out[i].bits = static_cast<uint8_t>(codes[2 * i] | codes[2 * i + 1] << 4);
  return scale;
}

template <int kGroup, class X>
FASTINFER_INLINE void quantize_int4(const X* x, int head_dim, Int4Pair* out, Int4Scale* scales) {
  for (int i = 0; i < head_dim; i += kGroup) {
    *scales++ = quantize_int4_group<kGroup>(x + i, std::min(kGroup, head_dim - i), out + i / 2);
  }
}

// kLanes codes, as integers in fp32.
FASTINFER_INLINE f32v load_int4(const Int4Pair* p) {
  u32v words, shifts;
  for (int i = 0; i < kLanes; ++i) shifts[i] = 4 * (i % 8);
  if constexpr (kLanes == 8) {
    words = load_as<uint32_t>(p) - u32v{};
  } else {
    const uint32_t low = load_as<uint32_t>(p), high = load_as<uint32_t>(p + 4);
    for (int i = 0; i < kLanes; ++i) words[i] = i < 8 ? low : high;
  }
  return to_f32((i32v)((words >> shifts) & 15u));
}

// The scale and the minimum, each in every lane.
FASTINFER_INLINE void load_scale(const Int4Scale* p, f32v& scale, f32v& minimum) {
#if defined(FASTINFER_AVX2)
  typedef uint32_t Words __attribute__((vector_size(kLanes * 2)));
  const f32v pair = half_to_float((u16half)Words{load_as<uint32_t>(p)});
  scale = __builtin_shuffle(pair, i32v{}), minimum = __builtin_shuffle(pair, i32v{} + 1);
#else
  scale = broadcast(to_float(p->scale)), minimum = broadcast(to_float(p->minimum));
#endif
}

// A head to fp32; what is beyond its elements up to a multiple of kLanes becomes zeros.
template <int kGroup>
FASTINFER_INLINE void widen_int4(const Int4Pair* codes, const Int4Scale* scales, int head_dim, float* out) {
  f32v scale, minimum;
  int begin = 0;
  for (; begin + kGroup <= head_dim; begin += kGroup) {
    load_scale(scales++, scale, minimum);
#pragma GCC unroll 8
    for (int i = begin; i < begin + kGroup; i += kLanes) store(out + i, load_int4(codes + i / 2) * scale + minimum);
  }
  if (begin == head_dim) return;
  load_scale(scales, scale, minimum);
  for (int i = begin; i < head_dim; i += kLanes) {
    const int lanes = std::min(kLanes, head_dim - i);
    Int4Pair some[kLanes / 2] = {};
    std::copy_n(codes + i / 2, lanes / 2, some);
    float values[kLanes] = {};
    store_partial(values, load_int4(some) * scale + minimum, lanes);
    store(out + i, load(values));
  }
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
