#include "quant/quantized_gemm_cpu.h"

namespace fastinfer::cpu::FASTINFER_ISA {
namespace {

struct Int8Format {
  static constexpr int kSteps = 8;  // 4 inputs each
  static constexpr int kScales = 1;
  static constexpr int kBlockBytes = kSteps * kTileRows * 4;
  static constexpr float kSymmetricOffset = 0.0f;

  FASTINFER_INLINE static RunBytes load_run(const uint8_t* block, int run) {
    RunBytes bytes;
#pragma GCC unroll 4
    for (int s = 0; s < kRunSteps; ++s) bytes.step[s] = load_as<u8v>(block + (run * kRunSteps + s) * kTileRows * 4);
    return bytes;
  }

#if defined(FASTINFER_AVX512_VNNI)
  static constexpr float kUnsignedOffset = 128.0f;

  FASTINFER_INLINE static RunBytes load_unsigned(const uint8_t* block, int run) {
    RunBytes bytes = load_run(block, run);
#pragma GCC unroll 4
    for (u8v& step : bytes.step) step ^= 0x80;
    return bytes;
  }
#else
  static constexpr int kVectors = 1;  // widened, a run takes eight registers

  template <int kBits>
  using Run = WideRun<kBits>;

  template <int kBits>
  FASTINFER_INLINE static Run<kBits> load(const uint8_t* block, int run) {
    return Run<kBits>::of_signed(load_run(block, run));
  }
#endif

  template <class Fn>
  FASTINFER_INLINE static void for_each_input(const uint8_t* weight, Fn&& fn) {
    for (int s = 0; s < kSteps; ++s) {
      const i32v packed = load_as<i32v>(weight + s * kTileRows * 4);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) fn(4 * s + i, (packed << (24 - 8 * i)) >> 24);
    }
  }
};

}  // namespace

void int8_gemm(const QuantizedGemmParams& p) {
  p.weight.scale_dtype == DType::kFloat16 ? run_quantized_gemm<Int8Format, Float16>(p)
                                          : run_quantized_gemm<Int8Format, float>(p);
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
