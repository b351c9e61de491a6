#include "quant/unsigned_format_cpu.h"

namespace fastinfer::cpu::FASTINFER_ISA {
namespace {

// Four steps as in 4 bits hold the low bits. Bit s of a byte of the fifth one is the high bit of step s of the block's
// eight.
struct Int5Format : UnsignedFormat<Int5Format> {
  static constexpr int kSteps = 5;
  static constexpr int kBlockBytes = kSteps * kTileRows * 4;
  static constexpr float kSymmetricOffset = 16.0f;  // a weight without minimum is scale * (q - 16)

  FASTINFER_INLINE static RunBytes load_run(const uint8_t* block, int run) {
    const uint8_t* packed = block + 2 * run * kTileRows * 4;
    const u8v first = in_register(load_as<u8v>(packed)), second = in_register(load_as<u8v>(packed + kTileRows * 4));
    u16v high = (u16v)in_register(load_as<u8v>(block + 4 * kTileRows * 4));
    if (run == 0) high <<= 4;
    return {{low_nibbles(first) | ((u8v)high & 0x10), high_nibbles(first) | ((u8v)(high >> 1) & 0x10),
             low_nibbles(second) | ((u8v)(high >> 2) & 0x10), high_nibbles(second) | ((u8v)(high >> 3) & 0x10)}};
  }

  template <class Fn>
  FASTINFER_INLINE static void for_each_input(const uint8_t* weight, Fn&& fn) {
    for (int run = 0; run < 2; ++run) {
      const RunBytes bytes = load_run(weight, run);
      for (int s = 0; s < kRunSteps; ++s) {
        const auto packed = (i32v)bytes.step[s];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) fn(run * kRunInputs + 4 * s + i, (packed >> 8 * i) & 0xff);
      }
    }
  }
};

}  // namespace

void int5_gemm(const QuantizedGemmParams& p) {
  if (p.weight.has_two_levels()) return run_quantized_gemm<Int5Format, TwoLevel<32> >(p);
  p.weight.scale_dtype == DType::kFloat16 ? run_quantized_gemm<Int5Format, Float16>(p)
                                          : run_quantized_gemm<Int5Format, float>(p);
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
