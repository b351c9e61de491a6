#include "quant/quantized_gemm_cpu.h"

namespace fastinfer::cpu::FASTINFER_ISA {
namespace {

// Four steps as in 4 bits hold the low bits. A fifth and a sixth hold the high bits of one run each: bits 2s and 2s + 1
// of a byte belong to step s of the run.
struct Int6Format {
  static constexpr int kSteps = 6;
  static constexpr int kScales = 2;  // one per run
  static constexpr int kBlockBytes = kSteps * kTileRows * 4;
  static constexpr float kSymmetricOffset = 0.0f;

  // 0..63, which stand for -32..31.
  FASTINFER_INLINE static RunBytes load_run(const uint8_t* block, int run) {
    const uint8_t* packed = block + 2 * run * kTileRows * 4;
    const u8v first = in_register(load_as<u8v>(packed)), second = in_register(load_as<u8v>(packed + kTileRows * 4));
    const u16v high = (u16v)in_register(load_as<u8v>(block + (4 + run) * kTileRows * 4));
    return {{low_nibbles(first) | ((u8v)(high << 4) & 0x30), high_nibbles(first) | ((u8v)(high << 2) & 0x30),
             low_nibbles(second) | ((u8v)high & 0x30), high_nibbles(second) | ((u8v)(high >> 2) & 0x30)}};
  }

  FASTINFER_INLINE static RunBytes load_signed(const uint8_t* block, int run) {
    RunBytes bytes = load_run(block, run);
#pragma GCC unroll 4
    for (u8v& step : bytes.step) step -= 32;
    return bytes;
  }

#if defined(FASTINFER_AVX512_VNNI)
  FASTINFER_INLINE static RunBytes load_unsigned(const uint8_t* block, int run) {
    return load_run(block, run);
  }
#else
  static constexpr int kVectors = kHalves;  // read together, to use a broadcast activation twice

  template <int kBits>
  using Run = std::conditional_t<kBits == 8, OffsetPairRun, WideRun<kBits, 2> >;

  template <int kBits>
  FASTINFER_INLINE static Run<kBits> load(const uint8_t* block, int run) {
    if constexpr (kBits == 8) {
      return {load_run(block, run)};
    } else {
      return Run<kBits>::of_signed(load_signed(block, run));
    }
  }
#endif

  template <class Fn>
  FASTINFER_INLINE static void for_each_input(const uint8_t* weight, Fn&& fn) {
    for (int run = 0; run < 2; ++run) {
      const RunBytes bytes = load_signed(weight, run);
      for (int s = 0; s < kRunSteps; ++s) {
        const auto packed = (i32v)bytes.step[s];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) fn(run * kRunInputs + 4 * s + i, (packed << (24 - 8 * i)) >> 24);
      }
    }
  }
};

}  // namespace

void int6_gemm(const QuantizedGemmParams& p) {
  run_quantized_gemm<Int6Format, TwoLevel<16> >(p);
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
