// 4-bit and 8-bit matrix products on the CPU; the two formats differ only in how a block's weights are read.
//
// A format names its block (Block), reads it for integer products (load), and yields the weight of one input for all
// lanes as fp32 (value). Lanes are weight rows, so no product ends in a horizontal sum.
#pragma once

#include "common/cpu/dot.h"
#include "fused/gemm_cpu.h"
#include "quant/quantized_rows.h"

namespace fastinfer::cpu::FASTINFER_ISA {

// Calls fn(block, scale, min) over the blocks of one tile's inputs, for the half-th vector of its rows.
template <class Format, class Scale, class Fn>
FASTINFER_INLINE void for_each_block(const QuantizedGemmParams& p, int64_t tile, int half, Fn&& fn) {
  const QuantizedWeight& w = p.weight;
  const int64_t blocks = p.k / kBlockInputs, groups = blocks / w.group_blocks;
  const int64_t first = tile * groups * kTileRows + half * kLanes;
  const Scale* scales = static_cast<const Scale*>(w.scales) + first;
  const Scale* mins = w.mins != nullptr ? static_cast<const Scale*>(w.mins) + first : nullptr;
  const auto* weight = static_cast<const uint8_t*>(w.q) + tile * blocks * Format::kBlockBytes + half * kLanes * 4;
  for (int64_t group = 0; group < groups; ++group) {
    const f32v scale = load(scales + group * kTileRows);
    const f32v min = mins != nullptr ? load(mins + group * kTileRows) : scale * Format::kSymmetricMin;
    for (int64_t block = group * w.group_blocks; block < (group + 1) * w.group_blocks; ++block) {
      fn(block, weight + block * Format::kBlockBytes, scale, min);
    }
  }
}

// Integer products. y = sum over runs of 16 inputs of scale_w scale_x dot(q_w, q_x), plus min_w (sum of x).
template <class Format, class Scale, int kPlanes>
struct IntegerKernel {
  static constexpr int kMaxRows = 16;

  const QuantizedGemmParams& p;
  QuantizedRows x;

  template <int kRows>
  void tile(int64_t tile, int64_t row, float* sums, int stride) const {
    const bool has_min = p.weight.mins != nullptr || Format::kSymmetricMin != 0.0f;
    const int64_t scale_stride = p.k / kScaleInputs, sum_stride = p.k / kBlockInputs;
    const float* scales = x.scale + row * scale_stride;
    const float* x_sums = x.sum + row * sum_stride;
    for (int half = 0; half < kHalves; ++half) {
      f32v acc[kRows] = {};
      for_each_block<Format, Scale>(p, tile, half, [&](int64_t b, const uint8_t* weight, f32v scale, f32v min) {
        const typename Format::Block block(weight);
        for (int r = 0; r < kRows; ++r) {
          const int64_t at = (row + r) * p.k + b * kBlockInputs;
          const float* x_scale = scales + r * scale_stride + 2 * b;
          const f32v low = to_f32(dot(block, 0, at)), high = to_f32(dot(block, 1, at + kScaleInputs));
          acc[r] += (low * x_scale[0] + high * x_scale[1]) * scale;
          if (has_min) acc[r] += min * x_sums[r * sum_stride + b];
        }
      });
      for (int r = 0; r < kRows; ++r) store(sums + r * stride + half * kLanes, acc[r]);
    }
  }

  // Products of the half-th 16 inputs of a block; theirs start at byte `at` of the planes.
  FASTINFER_INLINE i32v dot(const typename Format::Block& block, int half, int64_t at) const {
    const int64_t i = at / kScaleInputs;
    i32v result = block.dot(half, x.plane[0] + at, x.total + i);
    if constexpr (kPlanes == 2) {
      result = result * kPlaneBase + block.dot(half, x.plane[1] + at, x.total + x.plane_totals + i);
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

  template <int kRows>
  void tile(int64_t tile, int64_t row, float* sums, int stride) const {
    for (int half = 0; half < kHalves; ++half) {
      f32v acc[kRows] = {};
      for_each_block<Format, Scale>(p, tile, half, [&](int64_t b, const uint8_t* weight, f32v scale, f32v min) {
        const float* first = x.data + row * x.stride + b * kBlockInputs;
        Format::for_each_input(weight, [&](int input, i32v q) {
          const f32v w = to_f32(q) * scale + min;
          for (int r = 0; r < kRows; ++r) acc[r] += w * first[r * x.stride + input];
        });
      });
      for (int r = 0; r < kRows; ++r) store(sums + r * stride + half * kLanes, acc[r]);
    }
  }
};

template <class Format>
void run_quantized_gemm(const QuantizedGemmParams& p) {
  const auto run = [&]<class Scale>(Scale) {
    switch (p.activation_bits) {
      case 8: return run_gemm(p, IntegerKernel<Format, Scale, 1>{p, quantize_rows<1>(p)});
      case 16: return run_gemm(p, IntegerKernel<Format, Scale, 2>{p, quantize_rows<2>(p)});
      default: return run_gemm(p, FloatKernel<Format, Scale>{p, float_rows(p)});
    }
  };
  p.weight.scale_dtype == DType::kFloat16 ? run(Float16{}) : run(float{});
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
