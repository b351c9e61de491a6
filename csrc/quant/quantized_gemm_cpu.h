// 4-bit and 8-bit matrix products on the CPU; the two formats differ only in how a block's weights are read.
//
// A format names its block (Block), reads it for integer products (load), and yields the weight of one input for all
// lanes as fp32 (value). Lanes are weight rows, so no product ends in a horizontal sum.
#pragma once

#include "common/cpu/dot.h"
#include "fused/gemm_cpu.h"

namespace fastinfer::cpu::FASTINFER_ISA {

template <class Scale>
struct Scales {
  const Scale* scales;
  const Scale* mins;  // or null
  int64_t groups;
  int64_t group_blocks;

  Scales(const QuantizedWeight& w, int64_t k)
      : scales(static_cast<const Scale*>(w.scales)),
        mins(static_cast<const Scale*>(w.mins)),
        groups(k / kBlockInputs / w.group_blocks),
        group_blocks(w.group_blocks) {}

  int64_t index(int64_t tile, int64_t block) const {
    return (tile * groups + block / group_blocks) * kTileRows;
  }
};

// Integer products: activations in 8 bits. y = sum over blocks of (scale_w scale_x) dot(q_w, q_x) + min_w (scale_x sum
// q_x).
template <class Format, class Scale>
struct IntegerKernel {
  static constexpr int kMaxRows = 16;

  const QuantizedGemmParams& p;
  Int8Rows x;
  Scales<Scale> scales;

  template <int kRows>
  void tile(int64_t tile, int64_t row, float* sums, int stride) const {
    const int64_t blocks = p.k / kBlockInputs;
    const auto* weight = static_cast<const uint8_t*>(p.weight.q) + tile * blocks * Format::kBlockBytes;
    f32v acc[kRows][kHalves] = {};
    for (int64_t b = 0; b < blocks; ++b, weight += Format::kBlockBytes) {
      const int64_t s = scales.index(tile, b);
      for (int h = 0; h < kHalves; ++h) {
        const typename Format::Block block(weight + h * kLanes * 4);
        const f32v scale = load(scales.scales + s + h * kLanes);
        const bool has_min = scales.mins != nullptr;
        const f32v min = has_min ? load(scales.mins + s + h * kLanes) : scale * Format::kSymmetricMin;
        for (int r = 0; r < kRows; ++r) {
          const int64_t xb = (row + r) * blocks + b;
          const f32v dot = to_f32(block.dot(x.q + xb * kBlockInputs, x.total[xb]));
          acc[r][h] += dot * (scale * x.scale[xb]);
          if (has_min || Format::kSymmetricMin != 0.0f) {
            acc[r][h] += min * (x.scale[xb] * static_cast<float>(x.total[xb]));
          }
        }
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int h = 0; h < kHalves; ++h) store(sums + r * stride + h * kLanes, acc[r][h]);
    }
  }
};

// fp32 products: the weights are dequantised on the fly, once for kRows rows of x.
template <class Format, class Scale>
struct FloatKernel {
  static constexpr int kMaxRows = 4;

  const QuantizedGemmParams& p;
  FloatRows x;
  Scales<Scale> scales;

  template <int kRows>
  void tile(int64_t tile, int64_t row, float* sums, int stride) const {
    const int64_t blocks = p.k / kBlockInputs;
    const auto* weight = static_cast<const uint8_t*>(p.weight.q) + tile * blocks * Format::kBlockBytes;
    f32v acc[kRows][kHalves] = {};
    for (int64_t b = 0; b < blocks; ++b, weight += Format::kBlockBytes) {
      const int64_t s = scales.index(tile, b);
      for (int h = 0; h < kHalves; ++h) {
        const f32v scale = load(scales.scales + s + h * kLanes);
        const bool has_min = scales.mins != nullptr;
        const f32v min = has_min ? load(scales.mins + s + h * kLanes) : scale * Format::kSymmetricMin;
        Format::for_each_input(weight + h * kLanes * 4, [&](int input, i32v q) {
          const f32v w = to_f32(q) * scale + min;
          for (int r = 0; r < kRows; ++r) acc[r][h] += w * x.data[(row + r) * x.stride + b * kBlockInputs + input];
        });
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int h = 0; h < kHalves; ++h) store(sums + r * stride + h * kLanes, acc[r][h]);
    }
  }
};

template <class Format>
void run_quantized_gemm(const QuantizedGemmParams& p) {
  const auto run = [&]<class Scale>(Scale) {
    const Scales<Scale> scales(p.weight, p.k);
    if (p.quantize_activations) {
      run_gemm(p, IntegerKernel<Format, Scale>{p, int8_rows(p), scales});
    } else {
      run_gemm(p, FloatKernel<Format, Scale>{p, float_rows(p), scales});
    }
  };
  p.weight.scale_dtype == DType::kFloat16 ? run(Float16{}) : run(float{});
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
