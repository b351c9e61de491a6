// 4-bit and 8-bit matrix products on the CPU; the two formats differ only in how a block's weights are read.
//
// A format names its block (Block), reads it for integer products (load), and yields the weight of one input for all
// lanes as fp32 (value). Lanes are weight rows, so no product ends in a horizontal sum.
#pragma once

#include "common/cpu/dot.h"
#include "fused/gemm_cpu.h"
#include "quant/quantized_rows.h"

namespace fastinfer::cpu::FASTINFER_ISA {

// Calls fn(block, weight, scale, min) over blocks begin .. end - 1 of one tile's inputs, for the half-th vector of its
// rows.
template <class Format, class Scale, class Fn>
FASTINFER_INLINE void for_each_block(const QuantizedGemmParams& p, int64_t tile, int half, int64_t begin, int64_t end,
                                     Fn&& fn) {
  const QuantizedWeight& w = p.weight;
  const int64_t blocks = p.k / kBlockInputs, groups = blocks / w.group_blocks;
  const int64_t first = tile * groups * kTileRows + half * kLanes;
  const Scale* scales = static_cast<const Scale*>(w.scales) + first;
  const Scale* mins = w.mins != nullptr ? static_cast<const Scale*>(w.mins) + first : nullptr;
  const auto* weight = static_cast<const uint8_t*>(w.q) + tile * blocks * Format::kBlockBytes + half * kLanes * 4;
  for (int64_t block = begin, group = begin / w.group_blocks; block < end; ++group) {
    const f32v scale = load(scales + group * kTileRows);
    const f32v min = mins != nullptr ? load(mins + group * kTileRows) : scale * -Format::kSymmetricOffset;
    for (const int64_t stop = std::min(end, (group + 1) * w.group_blocks); block < stop; ++block) {
      fn(block, weight + block * Format::kBlockBytes, scale, min);
    }
  }
}

// Integer products: y = scale_x * sum over blocks of scale_w * (sum over runs of multiplier_x dot(q_w, q_x)) + min_w *
// (sum of x), the minimums first.
template <class Format, class Scale, int kBits>
struct IntegerKernel {
  using Products = typename Format::template Products<kBits>;
  using Run = typename Products::Run;
  static constexpr int kMaxRows = kLanes == 16 ? 8 : 4;  // of 32 or 16 registers

  const QuantizedGemmParams& p;
  QuantizedRows<Run> x;

  // With so few rows the weights come as fast as memory gives them: those further on, and the next tile's scales and
  // minimums, are prefetched. In decoding that raised about 0.72 of the bandwidth of plain reading to 0.82.
  template <int kRows>
  static constexpr bool kStreams = kRows < 4;
  static constexpr int kPrefetchBytes = 2048;

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

  // A weight is scale * (q - offset) + min: the sum of x times (min - offset * scale).
  template <int kRows>
  FASTINFER_INLINE void add_mins(int64_t tile, int vector, int64_t row, f32v (&acc)[kRows][Format::kVectors]) const {
    const int64_t groups = p.k / kBlockInputs / p.weight.group_blocks;
    const int64_t first = tile * groups * kTileRows + vector * kLanes;
    const Scale* scales = static_cast<const Scale*>(p.weight.scales) + first;
    const Scale* mins = static_cast<const Scale*>(p.weight.mins != nullptr ? p.weight.mins : p.weight.scales) + first;
    constexpr float kOffset = Products::kOffset, kSymmetricOffset = kOffset + Format::kSymmetricOffset;
    if (p.weight.mins == nullptr) {
      if constexpr (kSymmetricOffset != 0.0f) {
        add_sums<kRows>(row, acc, [&](int64_t at) { return load(scales + at) * -kSymmetricOffset; });
      }
    } else if constexpr (kOffset != 0.0f) {
      add_sums<kRows>(row, acc, [&](int64_t at) { return load(mins + at) - load(scales + at) * kOffset; });
    } else {
      add_sums<kRows>(row, acc, [&](int64_t at) {
        if constexpr (kStreams<kRows>) __builtin_prefetch(mins + at + groups * kTileRows);
        return load(mins + at);
      });
    }
  }

  template <int kRows, class Factor>
  FASTINFER_INLINE void add_sums(int64_t row, f32v (&acc)[kRows][Format::kVectors], Factor&& factor) const {
    const int64_t blocks = p.k / kBlockInputs;
    const float* sums = x.sum + row * blocks;
    for (int64_t at = 0, b = 0; b < blocks; at += kTileRows) {
      f32v factors[Format::kVectors];
#pragma GCC unroll 2
      for (int v = 0; v < Format::kVectors; ++v) factors[v] = factor(at + v * kLanes);
      for (const int64_t end = b + p.weight.group_blocks; b < end; ++b) {
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
          for (int v = 0; v < Format::kVectors; ++v) acc[r][v] += factors[v] * sums[r * blocks + b];
        }
      }
    }
  }

  template <int kRows>
  FASTINFER_INLINE void add_products(int64_t tile, int vector, int64_t row,
                                     f32v (&acc)[kRows][Format::kVectors]) const {
    constexpr int kVectors = Format::kVectors;
    const int64_t blocks = p.k / kBlockInputs, groups = blocks / p.weight.group_blocks, runs = p.k / kRunInputs;
    const Scale* scales = static_cast<const Scale*>(p.weight.scales) + tile * groups * kTileRows + vector * kLanes;
    const uint8_t* weight =
        static_cast<const uint8_t*>(p.weight.q) + tile * blocks * Format::kBlockBytes + vector * kLanes * 4;
    const auto* q = x.q + row * p.k;
    const auto* multiplier = x.multiplier + row * runs;
    for (int64_t group = 0; group < groups; ++group, scales += kTileRows) {
      f32v scale[kVectors];
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) scale[v] = load(scales + v * kLanes);
      if constexpr (kStreams<kRows>) __builtin_prefetch(scales + groups * kTileRows);
      for (int64_t b = 0; b < p.weight.group_blocks; ++b) {
        ScaledDot<Run> dots[kRows][kVectors];
#pragma GCC unroll 2
        for (int run = 0; run < 2; ++run) {
          Run weights[kVectors];
#pragma GCC unroll 2
          for (int v = 0; v < kVectors; ++v) weights[v] = Products::load(weight + v * kLanes * 4, run);
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
            for (int v = 0; v < kVectors; ++v) {
              dots[r][v].add(weights[v], q + r * p.k + run * kRunInputs, multiplier + r * runs + run);
            }
          }
        }
        if constexpr (kStreams<kRows>) {
          for (int i = 0; i < Format::kBlockBytes; i += 64) __builtin_prefetch(weight + i + kPrefetchBytes);
        }
        weight += Format::kBlockBytes;
        q += kBlockInputs;
        multiplier += 2;
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
          for (int v = 0; v < kVectors; ++v) acc[r][v] += dots[r][v].sum() * scale[v];
        }
      }
    }
  }
};

// fp32 products of weights that are dequantised on the fly: Values names each by its integer, scale and minimum. The
// sums go through the inputs in one order, however many rows there are.
template <class Format, class Scale, class Values>
struct FloatKernel {
  static constexpr int kMaxRows = 4;

  const QuantizedGemmParams& p;
  FloatRows x;
  Values values;

  template <int kRows>
  void tile(int64_t tile, int64_t row, float* sums, int stride) const {
    for (int half = 0; half < kHalves; ++half) {
      f32v acc[kRows] = {};
      for_each_block<Format, Scale>(p, tile, half, 0, p.k / kBlockInputs,
                                    [&](int64_t b, const uint8_t* weight, f32v scale, f32v min) {
                                      const float* first = x.data + row * x.stride + b * kBlockInputs;
                                      Format::for_each_input(weight, [&](int input, i32v q) {
                                        const f32v w = values(q, scale, min);
                                        for (int r = 0; r < kRows; ++r) acc[r] += w * first[r * x.stride + input];
                                      });
                                    });
      for (int r = 0; r < kRows; ++r) store(sums + r * stride + half * kLanes, acc[r]);
    }
  }

  // With more rows the weights are dequantised once for all of a block's, as many as half of the L1 holds.
  static constexpr int kPanelFrom = 8;
  static constexpr int64_t kPanelBlocks = 8;
  static constexpr int kPanelRows = 12 / kHalves;  // sums in 12 of 16 registers

  void panel(int64_t tile, int64_t row0, int rows, float* sums, int stride) const {
    alignas(64) float weights[kPanelBlocks * kBlockInputs * kTileRows];
    for (int row = 0; row < rows; ++row) std::fill_n(sums + row * stride, kTileRows, 0.0f);
    const int64_t blocks = p.k / kBlockInputs;
    for (int64_t begin = 0; begin < blocks; begin += kPanelBlocks) {
      const int64_t end = std::min(blocks, begin + kPanelBlocks);
      for (int half = 0; half < kHalves; ++half) {
        float* out = weights + half * kLanes;
        for_each_block<Format, Scale>(p, tile, half, begin, end, [&](int64_t, const uint8_t* q, f32v scale, f32v min) {
          Format::for_each_input(q, [&](int input, i32v q) { store(out + input * kTileRows, values(q, scale, min)); });
          out += kBlockInputs * kTileRows;
        });
      }
      const float* first = x.data + row0 * x.stride + begin * kBlockInputs;
      int row = 0;
      const auto step = [&]<int kRows>() {
        for (; row + kRows <= rows; row += kRows) {
          multiply<kRows>(weights, (end - begin) * kBlockInputs, first + row * x.stride, sums + row * stride, stride);
        }
      };
      step.template operator()<kPanelRows>();
      step.template operator()<4>();
      step.template operator()<2>();
      step.template operator()<1>();
    }
  }

 private:
  template <int kRows>
  __attribute__((noinline)) void multiply(const float* weights, int64_t inputs, const float* rows, float* sums,
                                          int stride) const {
    f32v acc[kRows][kHalves];
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int half = 0; half < kHalves; ++half) acc[r][half] = load(sums + r * stride + half * kLanes);
    }
    for (int64_t i = 0; i < inputs; ++i, weights += kTileRows, ++rows) {
      f32v w[kHalves];
#pragma GCC unroll 2
      for (int half = 0; half < kHalves; ++half) w[half] = load(weights + half * kLanes);
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r) {
        const f32v value = in_register(broadcast(rows[r * x.stride]));
#pragma GCC unroll 2
        for (int half = 0; half < kHalves; ++half) acc[r][half] += w[half] * value;
      }
    }
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int half = 0; half < kHalves; ++half) store(sums + r * stride + half * kLanes, acc[r][half]);
    }
  }
};

struct LinearValues {
  FASTINFER_INLINE f32v operator()(i32v q, f32v scale, f32v min) const {
    return to_f32(q) * scale + min;
  }
};

template <class Format, class Scale, int kBits>
void run_integer_gemm(const QuantizedGemmParams& p) {
  using Kernel = IntegerKernel<Format, Scale, kBits>;
  run_gemm(p, Kernel{p, quantize_rows<typename Kernel::Run, kBits>(p)});
}

template <class Format>
void run_quantized_gemm(const QuantizedGemmParams& p) {
  const auto run = [&]<class Scale>(Scale) {
    switch (p.activation_bits) {
      case 8: return run_integer_gemm<Format, Scale, 8>(p);
      case 16: return run_integer_gemm<Format, Scale, 16>(p);
      default: return run_gemm(p, FloatKernel<Format, Scale, LinearValues>{p, float_rows(p), {}});
    }
  };
  p.weight.scale_dtype == DType::kFloat16 ? run(Float16{}) : run(float{});
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
