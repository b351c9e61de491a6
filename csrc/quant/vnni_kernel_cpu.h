// Integer products of packed weights with AVX-512 VNNI (vpdpbusd).
//
// A block is 32 inputs of a tile of 16 weight rows, in 8 steps of 64 bytes. In a step each 32-bit lane has four inputs
// of one weight row, and vpdpbusd multiplies them by the four activations that are broadcast to all lanes:
//
//              lane 0 (row 0)   lane 1 (row 1)        lane 15 (row 15)
//            +----------------+----------------+-----+----------------+
//   step 0   | inputs 0 .. 3  | inputs 0 .. 3  | ... | inputs 0 .. 3  |  x  x[0 .. 3]
//   step 1   | inputs 4 .. 7  | inputs 4 .. 7  | ... | inputs 4 .. 7  |  x  x[4 .. 7]     run 0: steps 0 .. 3
//     ...    |                |                |     |                |
//   step 7   | inputs 28 .. 31| inputs 28 .. 31| ... | inputs 28 .. 31|  x  x[28 .. 31]   run 1: steps 4 .. 7
//            +----------------+----------------+-----+----------------+
//
// No sum over lanes is left: lane i holds the sum of weight row i.
#pragma once

#include "quant/activation_quantization_cpu.h"
#include "quant/quantized_blocks_cpu.h"

namespace fastinfer::cpu::FASTINFER_ISA {

// y = scale_x * sum over blocks of (min_w * (sum of x) + scale_w * sum over runs of multiplier_x dot(q_w, q_x)), with
// the minimum of the unsigned weights that the instruction wants; or, if each run has its own scale, scale_x * sum over
// runs of scale_w * multiplier_x dot(q_w, q_x). Without kAddsMin, weights have no minimums and activations 8 bits: then
// the dot products are those of the signed weights, which saves one of 12 instructions.
template <class Format, class Scale, int kBits, bool kAddsMin>
struct VnniKernel {
  static constexpr int kScales = Format::kScales;
  static_assert(kScales == 2 || kAddsMin || kBits == 8);
  using UnsignedRun = std::conditional_t<kAddsMin, ByteRun<kBits>, CentredByteRun<int(Format::kSymmetricOffset)> >;
  using Run = std::conditional_t<kScales == 2, OffsetByteRun<kBits>, UnsignedRun>;
  using Block = ActivationBlock<Run>;
  static constexpr int kParts = Run::kParts;
  static constexpr int kMaxRows = 8;

  const QuantizedGemmParams& p;
  QuantizedActivations<Run> x;
  Format format;

  template <int kRows>
  void tile(int64_t tile, int64_t row, float* sums, int stride) const {
    f32v acc[kRows][1] = {};
    const int64_t blocks = p.k / kBlockInputs;
    const Block* block = x.at(row, 0);
    for_each_block<Format, Scale, true>(
        p, tile, 0, 0, blocks, [&](int64_t, const uint8_t* weight, const BlockScales<Format>& scales) {
          f32v scale[kScales][1];
#pragma GCC unroll 2
          for (int s = 0; s < kScales; ++s) scale[s][0] = scales.scale[s];
          if constexpr (kAddsMin) add_min<kRows, 1>(block, {unsigned_min(scales)}, acc);
          add_block<kRows, 1>(
              block, [&](int run) { return format.load_unsigned(weight, run); },
              [](const RunBytes& bytes, int step, int) { return bytes.step[step]; }, scale, acc);
          block += x.stride;
        });
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) store(sums + r * stride, acc[r][0] * x.scale[row + r]);
  }

  // With more rows, the weights of two tiles are unpacked once for all of a block's rows: broadcast activations serve
  // both tiles, and 6 rows by 2 vectors of dot products leave registers for their operands.
  static constexpr int kPanelFrom = 16, kPanelTiles = 2, kPanelRows = 192;
  static constexpr int64_t kMostPanelBlocks = 24;  // 30 KB for two tiles, of an L1 of 48 KB

  template <int kTiles>
  struct PanelBlock {
    alignas(64) uint8_t bytes[2][kRunSteps][kTiles][kTileRows * 4];
    f32v scales[kScales][kTiles], mins[kTiles];
  };

  template <int kTiles, class Done>
  void panel(int64_t tile, int64_t row0, int rows, float* sums, int stride, const Done& done) const {
    PanelBlock<kTiles> unpacked[kMostPanelBlocks];
    const int64_t blocks = p.k / kBlockInputs, parts = (blocks + kMostPanelBlocks - 1) / kMostPanelBlocks;
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t begin = blocks * part / parts, end = blocks * (part + 1) / parts;
      for (int t = 0; t < kTiles; ++t) unpack(tile + t, begin, end, t, unpacked);
      int row = 0;
      const auto step = [&]<int kRows>() {
        for (; row + kRows <= rows; row += kRows) {
          multiply<kRows, kTiles>(unpacked, row0 + row, begin, end, sums + row * stride, stride);
          if (end == blocks) done(row, kRows);
        }
      };
      step.template operator()<6>();
      step.template operator()<4>();
      step.template operator()<2>();
      step.template operator()<1>();
    }
  }

 private:
  FASTINFER_INLINE static f32v unsigned_min(const BlockScales<Format>& of) {
    return Format::kUnsignedOffset == 0.0f ? of.min : of.min - of.scale[0] * Format::kUnsignedOffset;
  }

  template <int kTiles>
  void unpack(int64_t tile, int64_t begin, int64_t end, int t, PanelBlock<kTiles>* unpacked) const {
    for_each_block<Format, Scale, true>(p, tile, 0, begin, end,
                                        [&](int64_t, const uint8_t* weight, const BlockScales<Format>& scales) {
#pragma GCC unroll 2
                                          for (int run = 0; run < 2; ++run) {
                                            const RunBytes bytes = format.load_unsigned(weight, run);
#pragma GCC unroll 4
                                            for (int step = 0; step < kRunSteps; ++step)
                                              store_as(unpacked->bytes[run][step][t], bytes.step[step]);
                                          }
#pragma GCC unroll 2
                                          for (int s = 0; s < kScales; ++s) unpacked->scales[s][t] = scales.scale[s];
                                          if constexpr (kAddsMin) unpacked->mins[t] = unsigned_min(scales);
                                          ++unpacked;
                                        });
  }

  // Adds the products of a block with kRows rows. load(run): a run's weights; step(weights, step, tile): four inputs of
  // each of a tile's rows. (Split any further, the compiler orders a single row's loads and prefetches differently, and
  // 8-bit weights from memory take 5 % longer.)
  template <int kRows, int kTiles, class Load, class Step>
  FASTINFER_INLINE static void add_block(const Block* block, Load&& load, Step&& step,
                                         const f32v (&scale)[kScales][kTiles], f32v (&acc)[kRows][kTiles]) {
    constexpr int kRuns = 2 / Run::kMultipliers;  // runs that share a multiplier
    f32v products[kRows][kTiles] = {};
#pragma GCC unroll 2
    for (int m = 0; m < Run::kMultipliers; ++m) {
      using Weights = decltype(load(0));
      Weights weights[kRuns];
#pragma GCC unroll 2
      for (int run = 0; run < kRuns; ++run) weights[run] = load(m * kRuns + run);
      // A sum of both runs' 16-bit products would be a chain of 16: too long to be hidden by few rows.
      constexpr int kChains = kRows <= 4 ? kRuns : 1, kSteps = kRuns * kRunSteps / kChains;
      i32v dots[kRows][kTiles];
#pragma GCC unroll 2
      for (int chain = 0; chain < kChains; ++chain) {
        i32v sums[kRows][kTiles];
#pragma GCC unroll 16
        for (int i = 0; i < Run::kParts * kSteps; ++i) {
          const int part = i / kSteps, at = chain * kSteps + i % kSteps;
          u8v w[kTiles];
#pragma GCC unroll 2
          for (int t = 0; t < kTiles; ++t) w[t] = in_register(step(weights[at / kRunSteps], at % kRunSteps, t));
          multiply_step<kRows, kTiles>(i % kSteps == 0, w, block, m, part, m * kRunInputs + 4 * at, sums);
        }
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
          for (int t = 0; t < kTiles; ++t) dots[r][t] = chain == 0 ? sums[r][t] : dots[r][t] + sums[r][t];
        }
      }
      add_multiplied<kRows, kTiles>(block, m, dots, products);
      if (kScales == 2 || m + 1 == Run::kMultipliers) add_scaled<kRows, kTiles>(products, scale[m % kScales], acc);
    }
  }

  // A step of a chain: adds four inputs of every weight row times those of kRows rows of x. All rows take a step before
  // the next one, because each waits five cycles for its sum. The first step of a part of the activations starts sums.
  template <int kRows, int kTiles>
  FASTINFER_INLINE static void multiply_step(bool first, const u8v (&w)[kTiles], const Block* block, int m, int part,
                                             int input, i32v (&sums)[kRows][kTiles]) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const int8_t* four = block[r].q[part] + input;
      i8v activations;
      if constexpr (kTiles > 1) activations = in_register((i8v)broadcast_word(four));
#pragma GCC unroll 2
      for (int t = 0; t < kTiles; ++t) {
        const i32v sum = first ? Run::start(block[r].multipliers, m, part, sums[r][t]) : sums[r][t];
        if constexpr (kTiles > 1) {
          sums[r][t] = dpbusd(sum, w[t], activations);
        } else {
          sums[r][t] = dpbusd(sum, w[t], four);
        }
      }
    }
  }

  // products += multiplier * dots, in fp32.
  template <int kRows, int kTiles>
  FASTINFER_INLINE static void add_multiplied(const Block* block, int m, const i32v (&dots)[kRows][kTiles],
                                              f32v (&products)[kRows][kTiles]) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int t = 0; t < kTiles; ++t) {
        products[r][t] = Run::add_multiplied(block[r].multipliers, m, dots[r][t], products[r][t]);
      }
    }
  }

  // acc += products * scale.
  template <int kRows, int kTiles>
  FASTINFER_INLINE static void add_scaled(const f32v (&products)[kRows][kTiles], const f32v (&scale)[kTiles],
                                          f32v (&acc)[kRows][kTiles]) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int t = 0; t < kTiles; ++t) acc[r][t] += products[r][t] * scale[t];
    }
  }

  template <int kRows, int kTiles>
  FASTINFER_INLINE static void add_min(const Block* block, const f32v (&min)[kTiles], f32v (&acc)[kRows][kTiles]) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const f32v sum = in_register(broadcast(block[r].sum));
#pragma GCC unroll 2
      for (int t = 0; t < kTiles; ++t) acc[r][t] += min[t] * sum;
    }
  }

  // Adds the products with blocks begin .. end - 1 to sums, which it begins and ends.
  template <int kRows, int kTiles>
  __attribute__((noinline)) void multiply(const PanelBlock<kTiles>* weights, int64_t row, int64_t begin, int64_t end,
                                          float* sums, int stride) const {
    f32v acc[kRows][kTiles] = {};
    if (begin > 0) {
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
        for (int t = 0; t < kTiles; ++t) acc[r][t] = load(sums + r * stride + t * kTileRows);
      }
    }
    const int64_t blocks = p.k / kBlockInputs;
    const Block* block = x.at(row, begin);
    for (const auto* stop = weights + (end - begin); weights < stop; ++weights, block += x.stride) {
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) __builtin_prefetch(block + 2 * x.stride + r);  // too far apart for the hardware
      if constexpr (kAddsMin) add_min<kRows, kTiles>(block, weights->mins, acc);
      add_block<kRows, kTiles>(
          block, [&](int run) { return weights->bytes[run]; },
          [](auto* bytes, int step, int t) { return load_as<u8v>(bytes[step][t]); }, weights->scales, acc);
    }
    const bool last = end == blocks;
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const float scale = last ? x.scale[row + r] : 1.0f;
#pragma GCC unroll 2
      for (int t = 0; t < kTiles; ++t) store(sums + r * stride + t * kTileRows, acc[r][t] * scale);
    }
  }
};

}  // namespace fastinfer::cpu::FASTINFER_ISA
