// Activations as integers, for integer products: x ~ scale * multiplier * q, with a scale per row and a multiplier per
// run of 16 inputs.
//
// Sixteen inputs, because a few channels are much larger than the rest and spoil the precision of their neighbours: on
// SmolLM2 runs of 16 halve the divergence from fp32 that runs of 32 cause. A multiplier is an integer, 1..4095, so that
// without VNNI a block's runs of 4-bit weights can be summed in integers.
#pragma once

#include <bit>
#include <cfloat>
#include <cmath>

#include "common/cpu/dot.h"
#include "fused/gemm_cpu.h"

namespace fastinfer::cpu::FASTINFER_ISA {

inline constexpr int32_t kLargestMultiplier = 4095;

// Of q. With 14 bits a block's sum of multiplier * q fits 32: 32 * 8191 * 4095 < 2^31.
template <int kBits>
inline constexpr float kLargestActivation = kBits == 8 ? 127.0f : 8191.0f;

// 32 inputs of a row, with all that their products need: one pointer per row, and one cache line (two with 16 bits).
template <class Run>
struct alignas(64) ActivationBlock {
  typename Run::X q[Run::kParts][kBlockInputs];
  typename Run::Multiplier multiplier[2];  // of its runs
  float sum;                               // of multiplier * q, by which the weights' minimum is multiplied
};

template <class Run>
struct QuantizedRows {
  // [k / 32, stride]: neighbours are rows, so that those of a product lie at constant distances from one pointer. Odd,
  // a stride spreads a row's blocks over the sets of the caches.
  const ActivationBlock<Run>* blocks;
  int64_t stride;
  const float* scale;  // [m]

  const ActivationBlock<Run>* at(int64_t row, int64_t block) const {
    return blocks + block * stride + row;
  }
};

// kLanes largest magnitudes of a run, as the bits of fp32: integers order those like numbers, and a NaN above all.
FASTINFER_INLINE i32v magnitudes_of(const float* x) {
  i32v largest{};
#pragma GCC unroll 2
  for (int i = 0; i < kRunInputs; i += kLanes) {
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

// q = round to nearest even of x * inverse, of a block's run. Returns kLanes sums of q.
template <class Run>
FASTINFER_INLINE i32v quantize_run(const float* x, float inverse, int run, ActivationBlock<Run>& out) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest even integer in the low bits
  i32v sum{};
#pragma GCC unroll 2
  for (int i = 0; i < kRunInputs; i += kLanes) {
    const i32v q = (i32v)(load(x + i) * inverse + kRound) - (i32v)broadcast(kRound);
    sum += q;
    store_activations(out.q, run * kRunInputs + i, q);
  }
  return sum;
}

// One row of x, in fp32. Returns its scale. `work` holds 2 k / 16 numbers, each k / 16 rounded up to whole vectors.
template <class Run>
float quantize_row(const float* x, int64_t k, float largest, float* work, ActivationBlock<Run>* blocks,
                   int64_t stride) {
  const int64_t runs = k / kRunInputs, padded = (runs + kLanes - 1) / kLanes * kLanes;
  auto* multipliers = reinterpret_cast<int32_t*>(work);
  float* inverses = work + padded;
  i32v row_magnitudes{};
  for (int64_t run = 0; run < runs; ++run) {
    const i32v magnitudes = magnitudes_of(x + run * kRunInputs);
    row_magnitudes = magnitudes > row_magnitudes ? magnitudes : row_magnitudes;
    multipliers[run] = reduce_max(magnitudes);
  }
  const auto amax = std::bit_cast<float>(reduce_max(row_magnitudes));
  const float steps = largest * kLargestMultiplier, inverse = steps / amax;
  // So small that this overflows, infinite or NaN: integers of 0, and a scale that keeps what is not finite.
  if (!(inverse <= FLT_MAX && amax <= FLT_MAX)) {
    ActivationBlock<Run> zero{};
    std::fill_n(zero.multiplier, 2, Run::multiplier(1));
    for (int64_t b = 0; b < runs / 2; ++b) blocks[b * stride] = zero;
    return amax <= FLT_MAX ? 0.0f : NAN;
  }
  for (int64_t run = 0; run < runs; run += kLanes) {
    const f32v ratio = load_as<f32v>(multipliers + run) / amax * static_cast<float>(kLargestMultiplier);
    i32v m = __builtin_convertvector(ratio, i32v);
    m -= to_f32(m) < ratio;  // up
    m = m < 1 ? i32v{} + 1 : m;
    store_as(multipliers + run, m);
    store(inverses + run, inverse / to_f32(m));
  }
  for (int64_t b = 0; b < runs / 2; ++b) {
    ActivationBlock<Run>& block = blocks[b * stride];
    i32v sum{};
#pragma GCC unroll 2
    for (int run = 0; run < 2; ++run) {
      const int64_t at = 2 * b + run;
      sum += quantize_run(x + at * kRunInputs, inverses[at], run, block) * multipliers[at];
      block.multiplier[run] = Run::multiplier(multipliers[at]);
    }
    block.sum = static_cast<float>(reduce_add(sum));
  }
  return amax / steps;
}

template <class Run, int kBits>
QuantizedRows<Run> quantize_rows(const GemmParams& p) {
  const int64_t runs = p.k / kRunInputs, stride = p.m | 1;
  auto* blocks = scratch_array<ActivationBlock<Run>>(kQuantized, p.k / kBlockInputs * stride);
  float* scale = scratch_array<float>(kScales, p.m);
  parallel_for(p.m, [&](int64_t begin, int64_t end) {
    float* x = scratch_array<float>(kRowBuffer, p.k + 2 * (runs + kLanes));
    for (int64_t row = begin; row < end; ++row) {
      load_row(p, row, x);
      scale[row] = quantize_row<Run>(x, p.k, kLargestActivation<kBits>, x + p.k, blocks + row, stride);
    }
  });
  return {.blocks = blocks, .stride = stride, .scale = scale};
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
