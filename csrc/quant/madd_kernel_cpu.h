// Integer products of packed weights without AVX-512 VNNI: bytes are multiplied and added in pairs (vpmaddubsw and
// vpmaddwd, see common/cpu/dot.h).
#pragma once

#include "quant/activation_quantization_cpu.h"
#include "quant/quantized_blocks_cpu.h"

namespace fastinfer::cpu::FASTINFER_ISA {

// y = scale_x * sum over blocks of scale_w * (sum over runs of multiplier_x dot(q_w, q_x)) + min_w *
// (sum of x), the minimums first; or, if each run has its own scale, scale_x * sum over runs of scale_w * multiplier_x
// dot(q_w, q_x).
template <class Format, class Scale, int kBits>
struct MaddKernel {
  using Run = typename Format::template Run<kBits>;
  static constexpr int kMaxRows = 4;  // each with one or two vectors of sums

  const QuantizedGemmParams& p;
  QuantizedActivations<Run> x;
  Format format;

  // With so few rows the weights come as fast as memory gives them: those further on, and the next tile's scales and
  // minimums, are prefetched. In decoding that raised about 0.72 of the bandwidth of plain reading to 0.82.
  template <int kRows>
  static constexpr bool kStreams = kRows < 4;

  template <int kRows>
  void tile(int64_t tile, int64_t row, float* sums, int stride) const {
    constexpr int kVectors = Format::kVectors;
    for (int vector = 0; vector < kHalves; vector += kVectors) {
      f32v acc[kRows][kVectors] = {};
      add_mins<kRows>(tile, vector, row, acc);
      add_products<kRows>(tile, vector, row, acc);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          store(sums + r * stride + (vector + v) * kLanes, acc[r][v] * x.scale[row + r]);
        }
      }
    }
  }

  // Without minimums a weight is scale * (q - the format's offset).
  template <int kRows>
  FASTINFER_INLINE void add_mins(int64_t tile, int vector, int64_t row, f32v (&acc)[kRows][Format::kVectors]) const {
    if (p.weight.mins == nullptr) {
      if constexpr (Format::kSymmetricOffset != 0.0f) {
        add_sums<kRows>(p.weight.scales, tile, vector, row, acc, -Format::kSymmetricOffset);
      }
    } else if constexpr (Format::kScales == 1) {
      add_sums<kRows>(p.weight.mins, tile, vector, row, acc, 1.0f);
    }
  }

  // Adds factor * number * (sum of x), with a number of each group.
  template <int kRows>
  FASTINFER_INLINE void add_sums(const void* numbers, int64_t tile, int vector, int64_t row,
                                 f32v (&acc)[kRows][Format::kVectors], float factor) const {
    const int64_t groups = p.k / kBlockInputs / p.weight.group_blocks;
    const ActivationBlock<Run>* block = x.at(row, 0);
    for (int64_t group = 0; group < groups; ++group) {
      f32v factors[Format::kVectors];
#pragma GCC unroll 2
      for (int v = 0; v < Format::kVectors; ++v) {
        factors[v] = GroupScales<Scale>(numbers, tile, groups, vector + v)[group] * factor;
      }
      if constexpr (kStreams<kRows>) GroupScales<Scale>(numbers, tile + 1, groups, vector).prefetch(group);
      for (int64_t b = 0; b < p.weight.group_blocks; ++b, block += x.stride) {
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
          for (int v = 0; v < Format::kVectors; ++v) acc[r][v] += factors[v] * block[r].sum;
        }
      }
    }
  }

  template <int kRows>
  FASTINFER_INLINE void add_products(int64_t tile, int vector, int64_t row,
                                     f32v (&acc)[kRows][Format::kVectors]) const {
    constexpr int kVectors = Format::kVectors, kScales = Format::kScales;
    const int64_t blocks = p.k / kBlockInputs, groups = blocks / p.weight.group_blocks * kScales;
    const uint8_t* weight =
        static_cast<const uint8_t*>(p.weight.q) + tile * blocks * Format::kBlockBytes + vector * kLanes * 4;
    const ActivationBlock<Run>* block = x.at(row, 0);
    for (int64_t group = 0; group < groups; group += kScales) {
      f32v scale[kScales][kVectors];
#pragma GCC unroll 4
      for (int i = 0; i < kScales * kVectors; ++i) {
        const GroupScales<Scale> scales(p.weight.scales, tile, groups, vector + i % kVectors);
        scale[i / kVectors][i % kVectors] = scales[group + i / kVectors];
      }
      if constexpr (kStreams<kRows>) GroupScales<Scale>(p.weight.scales, tile + 1, groups, vector).prefetch(group);
      for (int64_t b = 0; b < p.weight.group_blocks; ++b) {
        ScaledDot<Run> dots[kScales][kRows][kVectors];
#pragma GCC unroll 2
        for (int run = 0; run < 2; ++run) {
          Run weights[kVectors];
#pragma GCC unroll 2
          for (int v = 0; v < kVectors; ++v) weights[v] = format.template load<kBits>(weight + v * kLanes * 4, run);
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
            for (int v = 0; v < kVectors; ++v) {
              dots[run % kScales][r][v].add(weights[v], block[r].q[0] + run * kRunInputs, block[r].multipliers, run);
            }
          }
        }
        if constexpr (kStreams<kRows>) {
          for (int i = 0; i < Format::kBlockBytes; i += 64) __builtin_prefetch(weight + i + kPrefetchBytes);
        }
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
          for (int i = 0; i < kScales * kVectors; ++i) {
            const int s = i / kVectors, v = i % kVectors;
            acc[r][v] += dots[s][r][v].sum(block[r].multipliers) * scale[s][v];
          }
        }
        weight += Format::kBlockBytes;
        block += x.stride;
      }
    }
  }
};

}  // namespace fastinfer::cpu::FASTINFER_ISA
