// 4-bit and 8-bit matrix products on the CPU; the two formats differ only in how a block's weights are read.
//
// A format names its block (Block), reads it for integer products (load), and yields the weight of one input for all
// lanes as fp32 (value). Lanes are weight rows, so no product ends in a horizontal sum.
#pragma once

#include "common/cpu/dot.h"
#include "fused/gemm_cpu.h"
#include "quant/quantized_rows.h"

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

// Integer products. y = sum over runs of 16 inputs of (scale_w scale_x) dot(q_w, q_x), plus min_w (sum of x).
template <class Format, class Scale, int kPlanes>
struct IntegerKernel {
  static constexpr int kMaxRows = 16;

  const QuantizedGemmParams& p;
  QuantizedRows x;
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
          const int64_t at = (row + r) * p.k + b * kBlockInputs;
          for (int half = 0; half < kBlockInputs / kScaleInputs; ++half) {
            const int64_t i = at / kScaleInputs + half;
            acc[r][h] += to_f32(dot(block, half, at + half * kScaleInputs, i)) * (scale * x.scale[i]);
          }
          if (has_min || Format::kSymmetricMin != 0.0f) acc[r][h] += min * x.sum[at / kBlockInputs];
        }
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int h = 0; h < kHalves; ++h) store(sums + r * stride + h * kLanes, acc[r][h]);
    }
  }

  // Products of 16 inputs: byte `at` of the planes, entry `i` of their totals.
  FASTINFER_INLINE i32v dot(const typename Format::Block& block, int half, int64_t at, int64_t i) const {
    i32v result = block.dot(half, x.plane[0] + at, x.total[i]);
    if constexpr (kPlanes == 2) {
      result = result * kPlaneBase + block.dot(half, x.plane[1] + at, x.total[x.plane_totals + i]);
    }
    return result;
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
    switch (p.activation_bits) {
      case 8: return run_gemm(p, IntegerKernel<Format, Scale, 1>{p, quantize_rows<1>(p), scales});
      case 16: return run_gemm(p, IntegerKernel<Format, Scale, 2>{p, quantize_rows<2>(p), scales});
      default: return run_gemm(p, FloatKernel<Format, Scale>{p, float_rows(p), scales});
    }
  };
  p.weight.scale_dtype == DType::kFloat16 ? run(Float16{}) : run(float{});
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
