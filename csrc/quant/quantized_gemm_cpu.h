// 4-bit, 6-bit and 8-bit matrix products on the CPU; the formats differ only in how a block's weights are read. A
// format is an object, because a look-up table is; all others have no members.
//
// A format reads a run of a block for integer products, and yields the weight of one input for all lanes for fp32 ones.
// Lanes are weight rows, so no product ends in a horizontal sum.
#pragma once

#include <type_traits>

#include "quant/quantized_blocks_cpu.h"
#if defined(FASTINFER_TILES)
#include "gemm/tile_gemm_cpu.h"
#endif
#if defined(FASTINFER_AVX512_VNNI)
#include "quant/vnni_kernel_cpu.h"
#else
#include "quant/madd_kernel_cpu.h"
#endif

namespace fastinfer::cpu::FASTINFER_ISA {

// fp32 products of weights that are dequantised on the fly: Values names each by its integer, scale and minimum. The
// sums go through the inputs in one order, however many rows there are: those of even and of odd inputs are apart for
// kPanelBlocks blocks, because a row's one sum would wait four cycles for each of its inputs.
template <class Format, class Scale, class Values>
struct FloatKernel {
  static constexpr int kMaxRows = 4;

  const QuantizedGemmParams& p;
  FloatRows x;
  Values values;

  template <int kRows>
  void tile(int64_t tile, int64_t row, float* sums, int stride) const {
    const int64_t blocks = p.k / kBlockInputs;
    for (int half = 0; half < kHalves; ++half) {
      for (int r = 0; r < kRows; ++r) store(sums + r * stride + half * kLanes, f32v{});
      f32v even[kRows] = {}, odd[kRows] = {};
      for_each_block<Format, Scale>(p, tile, half, 0, blocks,
                                    [&](int64_t b, const uint8_t* weight, const BlockScales<Format>& scales) {
                                      const float* first = x.data + row * x.stride + b * kBlockInputs;
                                      Format::for_each_input(weight, [&](int input, i32v q) {
                                        const f32v w = value(scales, input, q);
#pragma GCC unroll 4
                                        for (int r = 0; r < kRows; ++r) {
                                          const f32v product = w * first[r * x.stride + input];
                                          (input % 2 == 0 ? even : odd)[r] += product;
                                        }
                                      });
                                      if ((b + 1) % kPanelBlocks != 0 && b + 1 < blocks) return;
#pragma GCC unroll 4
                                      for (int r = 0; r < kRows; ++r) {
                                        add(sums + r * stride + half * kLanes, even[r], odd[r]);
                                        even[r] = odd[r] = f32v{};
                                      }
                                    });
    }
  }

  // With more rows the weights are dequantised once for all of a block's, as many as half of the L1 holds.
  static constexpr int kPanelFrom = 8, kPanelTiles = 1, kPanelRows = kRowBlock;
  static constexpr int64_t kPanelBlocks = 8;
  static constexpr int kSumRows = kHalves == 1 ? 12 : 3;  // sums in 24 of 32 or 12 of 16 registers

  template <int kTiles, class Done>
  void panel(int64_t tile, int64_t row0, int rows, float* sums, int stride, const Done& done) const {
    static_assert(kTiles == kPanelTiles);
    alignas(64) float weights[kPanelBlocks * kBlockInputs * kTileRows];
    for (int row = 0; row < rows; ++row) std::fill_n(sums + row * stride, kTileRows, 0.0f);
    const int64_t blocks = p.k / kBlockInputs;
    for (int64_t begin = 0; begin < blocks; begin += kPanelBlocks) {
      const int64_t end = std::min(blocks, begin + kPanelBlocks);
      for (int half = 0; half < kHalves; ++half) {
        float* out = weights + half * kLanes;
        for_each_block<Format, Scale>(
            p, tile, half, begin, end, [&](int64_t, const uint8_t* weight, const BlockScales<Format>& scales) {
              Format::for_each_input(
                  weight, [&](int input, i32v q) { store(out + input * kTileRows, value(scales, input, q)); });
              out += kBlockInputs * kTileRows;
            });
      }
      const float* first = x.data + row0 * x.stride + begin * kBlockInputs;
      int row = 0;
      const auto step = [&]<int kRows>() {
        for (; row + kRows <= rows; row += kRows) {
          multiply<kRows>(weights, (end - begin) * kBlockInputs, first + row * x.stride, sums + row * stride, stride);
          if (end == blocks) done(row, kRows);
        }
      };
      step.template operator()<kSumRows>();
      if constexpr (kSumRows > 4) step.template operator()<4>();
      step.template operator()<2>();
      step.template operator()<1>();
    }
  }

 private:
  FASTINFER_INLINE f32v value(const BlockScales<Format>& scales, int input, i32v q) const {
    return values(q, scales.scale[input * Format::kScales / kBlockInputs], scales.min);
  }

  FASTINFER_INLINE static void add(float* sum, f32v even, f32v odd) {
    store(sum, load(sum) + (even + odd));
  }

  template <int kRows>
  __attribute__((noinline)) void multiply(const float* weights, int64_t inputs, const float* rows, float* sums,
                                          int stride) const {
    f32v acc[2][kRows][kHalves] = {};  // of even and of odd inputs
    for (int64_t i = 0; i < inputs; i += 2) {
#pragma GCC unroll 2
      for (int odd = 0; odd < 2; ++odd, weights += kTileRows, ++rows) {
        f32v w[kHalves];
#pragma GCC unroll 2
        for (int half = 0; half < kHalves; ++half) w[half] = load(weights + half * kLanes);
#pragma GCC unroll 12
        for (int r = 0; r < kRows; ++r) {
          f32v value = broadcast(rows[r * x.stride]);
          if constexpr (kHalves > 1) value = in_register(value);  // used once, it is an operand in memory
#pragma GCC unroll 2
          for (int half = 0; half < kHalves; ++half) acc[odd][r][half] += w[half] * value;
        }
      }
    }
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int half = 0; half < kHalves; ++half) {
        add(sums + r * stride + half * kLanes, acc[0][r][half], acc[1][r][half]);
      }
    }
  }
};

#if defined(FASTINFER_TILES)
// Packed weights as bf16 tiles: what FloatKernel computes with, rounded.
template <class Format, class Scale, class Values>
struct PackedTiles {
  const QuantizedGemmParams& p;
  Values values;

  void unpack(int64_t expert, int64_t tile, int64_t begin, int64_t end, uint8_t* out) const {
    tile += expert * ((p.n + kTileRows - 1) / kTileRows);
    for (int half = 0; half < kHalves; ++half) {
      uint8_t* pairs = out + half * kLanes * 4;
      for_each_block<Format, Scale>(p, tile, half, begin, end,
                                    [&](int64_t, const uint8_t* weight, const BlockScales<Format>& scales) {
                                      f32v even{};
                                      Format::for_each_input(weight, [&](int input, i32v q) {
                                        const f32v scale = scales.scale[input * Format::kScales / kBlockInputs];
                                        const f32v value = values(q, scale, scales.min);
                                        if (input % 2 == 0) {
                                          even = value;
                                        } else {
                                          store_as(pairs + input / 2 * 64, bfloat16_pairs(even, value));
                                        }
                                      });
                                      pairs += kTileBytes;
                                    });
    }
  }
};
#endif

struct LinearValues {
  FASTINFER_INLINE f32v operator()(i32v q, f32v scale, f32v min) const {
    return to_f32(q) * scale + min;
  }
};

template <class Format, class Scale, int kBits>
void run_integer_gemm(const QuantizedGemmParams& p, const Format& format) {
  const auto run = [&]<class Kernel>(std::type_identity<Kernel>) {
    run_gemm(p, Kernel{p, quantize_rows<typename Kernel::Run, kBits>(p), format});
  };
#if defined(FASTINFER_AVX512_VNNI)
  constexpr bool kOneScale = Format::kScales == 1;
  // Not for signed weights: 8 and 16 rows of 8-bit weights from memory would take 1.03 to 1.07 times as long.
  if constexpr (kOneScale && kBits == 8 && Format::kSymmetricOffset != 0.0f) {
    if (p.weight.mins == nullptr) return run(std::type_identity<VnniKernel<Format, Scale, kBits, false> >{});
  }
  run(std::type_identity<VnniKernel<Format, Scale, kBits, kOneScale> >{});
#else
  run(std::type_identity<MaddKernel<Format, Scale, kBits> >{});
#endif
}

template <class Format, class Scale>
void run_quantized_gemm(const QuantizedGemmParams& p) {
#if defined(FASTINFER_TILES)
  run_tile_gemm(p, PackedTiles<Format, Scale, LinearValues>{p, {}});
#else
  switch (p.activation_bits) {
    case 8: return run_integer_gemm<Format, Scale, 8>(p, Format{});
    case 16: return run_integer_gemm<Format, Scale, 16>(p, Format{});
    default: return run_gemm(p, FloatKernel<Format, Scale, LinearValues>{p, float_rows(p), {}});
  }
#endif
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
