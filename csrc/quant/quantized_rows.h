// Activations as integers, for integer products: x ~ scale * q, with one scale per row and 16 inputs.
//
// Sixteen inputs, because a few channels are much larger than the rest and spoil the precision of their neighbours: on
// SmolLM2 blocks of 16 halve the divergence from fp32 that blocks of 32 cause. q has 8 bits, or 16 in two planes of
// bytes, q = 128 high + low, so that the same byte products serve both.
#pragma once

#include <bit>
#include <cfloat>
#include <cmath>

#include "fused/gemm_cpu.h"

namespace fastinfer::cpu::FASTINFER_ISA {

inline constexpr int kScaleInputs = 16;
inline constexpr int kPlaneBase = 128;

struct QuantizedRows {
  const int8_t* plane[2];  // [m, k] each: the only plane, or high and low
  const float* scale;      // [m, k / 16]
  const int32_t* total;    // [m, k / 16] per plane: sum of its bytes, high plane first
  const float* sum;        // [m, k / 32]: sum of scale * q, by which the weight's minimum is multiplied
  int64_t plane_totals;    // distance between the planes' totals
};

struct QuantizedBlock {
  float scale;
  int32_t total[2];
};

// scale = max |x| / largest; q = round to nearest even of x / scale. Zeros get scale 0.
template <int kPlanes>
FASTINFER_INLINE QuantizedBlock quantize_block(const float* x, int8_t* high, int8_t* low) {
  constexpr float kLargest = kPlanes == 1 ? 127.0f : 127.0f * kPlaneBase;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest even integer in the low bits
  typedef int8_t Bytes __attribute__((vector_size(kLanes)));
  // Magnitudes are compared as integers, which order them like numbers and a NaN above all: it must not be lost.
  i32v magnitudes{};
  for (int i = 0; i < kScaleInputs; i += kLanes) {
    const i32v magnitude = load_as<i32v>(x + i) & 0x7fffffff;
    magnitudes = magnitude > magnitudes ? magnitude : magnitudes;
  }
  int32_t largest = 0;
  for (int i = 0; i < kLanes; ++i) largest = magnitudes[i] > largest ? magnitudes[i] : largest;
  const float amax = std::bit_cast<float>(largest);
  // So small that its reciprocal overflows, infinite or NaN: integers of 0, and a scale that keeps what is not finite.
  const float reciprocal = kLargest / amax;
  if (!(amax > 0.0f && reciprocal <= FLT_MAX && amax <= FLT_MAX)) {
    for (int i = 0; i < kScaleInputs; ++i) high[i] = low[i] = 0;
    return {amax <= FLT_MAX ? 0.0f : NAN, {0, 0}};
  }
  const f32v inverse = broadcast(reciprocal);
  i32v high_sum{}, low_sum{};
  for (int i = 0; i < kScaleInputs; i += kLanes) {
    const i32v q = (i32v)(load(x + i) * inverse + kRound) - (i32v)broadcast(kRound);
    if constexpr (kPlanes == 1) {
      high_sum += q;
      store_as(high + i, __builtin_convertvector(q, Bytes));
    } else {
      const i32v upper = (q + kPlaneBase / 2) >> 7;  // low = q - 128 upper lies in -64..63
      high_sum += upper;
      low_sum += q - upper * kPlaneBase;
      store_as(high + i, __builtin_convertvector(upper, Bytes));
      store_as(low + i, __builtin_convertvector(q - upper * kPlaneBase, Bytes));
    }
  }
  QuantizedBlock block{amax / kLargest, {0, 0}};
  for (int i = 0; i < kLanes; ++i) {
    block.total[0] += high_sum[i];
    block.total[1] += low_sum[i];
  }
  return block;
}

template <int kPlanes>
QuantizedRows quantize_rows(const GemmParams& p) {
  const int64_t bytes = p.m * p.k, scales = bytes / kScaleInputs, blocks = bytes / kBlockInputs;
  int8_t* q = scratch_array<int8_t>(kQuantized, kPlanes * bytes);
  float* scale = scratch_array<float>(kScales, scales * (1 + kPlanes) + blocks);
  float* sum = scale + scales;
  auto* total = reinterpret_cast<int32_t*>(sum + blocks);
  parallel_for(p.m, [&](int64_t begin, int64_t end) {
    float* x = scratch_array<float>(kRowBuffer, p.k);
    for (int64_t row = begin; row < end; ++row) {
      load_row(p, row, x);
      for (int64_t b = 0; b < p.k / kBlockInputs; ++b) {
        float block_sum = 0.0f;
        for (int half = 0; half < kBlockInputs / kScaleInputs; ++half) {
          const int64_t input = b * kBlockInputs + half * kScaleInputs, at = row * p.k + input;
          const QuantizedBlock block = quantize_block<kPlanes>(x + input, q + at, q + bytes * (kPlanes - 1) + at);
          scale[at / kScaleInputs] = block.scale;
          int32_t value = block.total[0];
          for (int plane = 0; plane < kPlanes; ++plane) total[plane * scales + at / kScaleInputs] = block.total[plane];
          if constexpr (kPlanes == 2) value = value * kPlaneBase + block.total[1];
          block_sum += block.scale * static_cast<float>(value);
        }
        sum[(row * p.k) / kBlockInputs + b] = block_sum;
      }
    }
  });
  return {.plane = {q, q + bytes * (kPlanes - 1)}, .scale = scale, .total = total, .sum = sum, .plane_totals = scales};
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
