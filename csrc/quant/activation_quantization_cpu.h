// Activations as integers, for integer products: x ~ scale * multiplier * q, with a scale per row and a multiplier per
// run of 16 inputs, or per 32 where q has 14 bits.
//
// Sixteen inputs, because a few channels are much larger than the rest and spoil the precision of their neighbours: on
// SmolLM2 runs of 16 halve the divergence from fp32 that runs of 32 cause. A multiplier is an integer, 1..4095, so that
// without VNNI a block's runs of 4-bit weights can be summed in integers.
#pragma once

#include <bit>
#include <cfloat>
#include <cmath>

#include "common/cpu/dot.h"
#include "common/cpu/reduce.h"
#include "gemm/gemm_cpu.h"

namespace fastinfer::cpu::FASTINFER_ISA {

inline constexpr int32_t kLargestMultiplier = 4095;

// The largest q. With 14 bits a block's sum of multiplier * q fits 32: 32 * 8191 * 4095 < 2^31.
template <int kBits>
inline constexpr float kLargestActivation = kBits == 8 ? 127.0f : 8191.0f;

// 32 inputs of a row, with all that their products need: one pointer per row, and one cache line (two with 16 bits).
template <class Run>
struct alignas(64) ActivationBlock {
  typename Run::X q[Run::kParts][kBlockInputs];
  typename Run::Multipliers multipliers;
  float sum;  // sum of multiplier * q, the factor of the weights' minimum
};

template <class Run>
struct QuantizedActivations {
  // [k / 32, stride]: neighbours are rows, so that those of a product lie at constant distances from one pointer. Odd,
  // a stride spreads a row's blocks over the sets of the caches.
  const ActivationBlock<Run>* blocks;
  int64_t stride;
  const float* scale;  // [m]

  const ActivationBlock<Run>* at(int64_t row, int64_t block) const {
    return blocks + block * stride + row;
  }
};

// Inputs that share a multiplier.
template <class Run>
inline constexpr int kSpan = kBlockInputs / Run::kMultipliers;

inline constexpr int kSpansAtOnce = 4;  // whose lanes are reduced together

// kLanes largest magnitudes of a span, as the bits of fp32: integers order those like numbers, and a NaN above all.
template <int kInputs>
FASTINFER_INLINE i32v magnitudes_of(const float* x) {
  i32v largest{};
#pragma GCC unroll 4
  for (int i = 0; i < kInputs; i += kLanes) {
    const i32v magnitude = load_as<i32v>(x + i) & 0x7fffffff;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

// kLanes inputs of a block's parts.
template <int kParts>
FASTINFER_INLINE void store_activations(int8_t (&out)[kParts][kBlockInputs], int input, i32v q) {
  if constexpr (kParts == 1) {
    store_bytes(out[0] + input, q);
  } else {
    store_bytes(out[0] + input, q >> 7);
    store_bytes(out[1] + input, q & 127);
  }
}

// Four inputs in the order 0, 2, 1, 3: see WideRun.
FASTINFER_INLINE void store_activations(int16_t (&out)[1][kBlockInputs], int input, i32v q) {
  u16x8 low[kLanes / 8];
  i32x8 parts[kLanes / 8];
  std::memcpy(parts, &q, sizeof(q));
#pragma GCC unroll 2
  for (int i = 0; i < kLanes / 8; ++i) {
    const u16x16 order = {0, 4, 2, 6, 8, 12, 10, 14}, halves = __builtin_shuffle((u16x16)parts[i], order);
    std::memcpy(&low[i], &halves, sizeof(low[i]));
  }
  std::memcpy(out[0] + input, low, sizeof(low));
}

// q = round to nearest even of x * inverse, of a span that begins at a block's input. Returns kLanes sums of q.
template <class Run>
FASTINFER_INLINE i32v quantize_span(const float* x, float inverse, int input, ActivationBlock<Run>& out) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest even integer in the low bits
  i32v sum{};
#pragma GCC unroll 4
  for (int i = 0; i < kSpan<Run>; i += kLanes) {
    const i32v q = (i32v)(load(x + i) * inverse + kRound) - (i32v)broadcast(kRound);
    sum += q;
    store_activations(out.q, input + i, q);
  }
  return sum;
}

// One row of x, in fp32. Returns its scale. `work` has room for 2 k / 16 numbers, each k / 16 rounded up to whole
// vectors.
template <class Run>
float quantize_row(const float* x, int64_t k, float largest, float* work, ActivationBlock<Run>* blocks,
                   int64_t stride) {
  const int64_t spans = k / kSpan<Run>, padded = (spans + kLanes - 1) / kLanes * kLanes;
  auto* multipliers = reinterpret_cast<int32_t*>(work);
  float* inverses = work + padded;
  i32v row_magnitudes{};
  for (int64_t first = 0; first < spans; first += kSpansAtOnce) {
    i32v magnitudes[kSpansAtOnce] = {};
#pragma GCC unroll 4
    for (int i = 0; i < kSpansAtOnce; ++i) {
      if (first + i < spans) magnitudes[i] = magnitudes_of<kSpan<Run>>(x + (first + i) * kSpan<Run>);
      row_magnitudes = magnitudes[i] > row_magnitudes ? magnitudes[i] : row_magnitudes;
    }
    store_as(multipliers + first, reduce_max(magnitudes[0], magnitudes[1], magnitudes[2], magnitudes[3]));
  }
  const auto amax = std::bit_cast<float>(reduce_max(row_magnitudes));
  const float steps = largest * kLargestMultiplier, inverse = steps / amax;
  // So small that this overflows, infinite or NaN: integers of 0, and a scale that keeps what is not finite.
  if (!(inverse <= FLT_MAX && amax <= FLT_MAX)) {
    for (int64_t b = 0; b < k / kBlockInputs; ++b) blocks[b * stride] = ActivationBlock<Run>{};
    return amax <= FLT_MAX ? 0.0f : NAN;
  }
  for (int64_t span = 0; span < spans; span += kLanes) {
    const f32v ratio = load_as<f32v>(multipliers + span) / amax * static_cast<float>(kLargestMultiplier);
    i32v m = __builtin_convertvector(ratio, i32v);
    m -= to_f32(m) < ratio;  // up
    m = m < 1 ? i32v{} + 1 : m;
    store_as(multipliers + span, m);
    store(inverses + span, inverse / to_f32(m));
  }
  constexpr int kMultipliers = Run::kMultipliers;
  for (int64_t first = 0; first < spans; first += kSpansAtOnce) {
    i32v lanes[kSpansAtOnce] = {};
#pragma GCC unroll 4
    for (int i = 0; i < kSpansAtOnce; ++i) {
      const int64_t span = first + i;
      if (span >= spans) break;
      lanes[i] = quantize_span(x + span * kSpan<Run>, inverses[span], i % kMultipliers * kSpan<Run>,
                               blocks[span / kMultipliers * stride]);
    }
    int32_t sums[kSpansAtOnce];
    store_as(sums, reduce_add(lanes[0], lanes[1], lanes[2], lanes[3]));
    for (int i = 0; i < kSpansAtOnce && first + i < spans; i += kMultipliers) {
      ActivationBlock<Run>& block = blocks[(first + i) / kMultipliers * stride];
      const int32_t* of_block = multipliers + first + i;
      int32_t sum = sums[i] * of_block[0];
      if constexpr (kMultipliers == 2) sum += sums[i + 1] * of_block[1];
      block.multipliers = Run::multipliers(of_block, sums + i);
      block.sum = static_cast<float>(sum);
    }
  }
  return amax / steps;
}

template <class Run, int kBits>
QuantizedActivations<Run> quantize_rows(const GemmParams& p) {
  const int64_t runs = p.k / kRunInputs, stride = p.m | 1;
  auto* blocks = scratch_array<ActivationBlock<Run>>(kQuantized, p.k / kBlockInputs * stride);
  float* scale = scratch_array<float>(kScales, p.m);
  const bool as_it_stands = p.dtype == DType::kFloat32 && p.norm_weight.data == nullptr;
  for_each_row_range(p, [&](int64_t begin, int64_t end) {
    float* buffer = scratch_array<float>(kRowBuffer, p.k + 2 * (runs + kLanes));
    for (int64_t row = begin; row < end; ++row) {
      const float* x = as_it_stands ? static_cast<const float*>(p.x) + p.expert_rows.x_row(row) * p.x_stride : buffer;
      if (!as_it_stands) load_row(p, row, buffer);
      scale[row] = quantize_row<Run>(x, p.k, kLargestActivation<kBits>, buffer + p.k, blocks + row, stride);
    }
  });
  return {.blocks = blocks, .stride = stride, .scale = scale};
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
