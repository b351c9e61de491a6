#include "quant/quantized_gemm_cpu.h"

namespace fastinfer::cpu::FASTINFER_ISA {
namespace {

struct Int8Format {
  static constexpr int kSteps = 8;  // of 4 inputs
  static constexpr int kBlockBytes = kSteps * kTileRows * 4;
  static constexpr float kSymmetricMin = 0.0f;

  struct Block {
    i8v q[kSteps];

    FASTINFER_INLINE explicit Block(const uint8_t* weight) {
      for (int s = 0; s < kSteps; ++s) q[s] = load_as<i8v>(weight + s * kTileRows * 4);
    }

    // With 16 inputs, the half-th run of the block, whose bytes add up to `*total`.
    FASTINFER_INLINE i32v dot(int half, const int8_t* x, const int32_t* total) const {
      Int8Dot result;
      for (int i = 0; i < kSteps / 2; ++i) result.add(q[half * kSteps / 2 + i], broadcast4(x + 4 * i));
      return result.sum(*total);
    }
  };

  template <class Fn>
  FASTINFER_INLINE static void for_each_input(const uint8_t* weight, Fn&& fn) {
    for (int s = 0; s < kSteps; ++s) {
      const i32v packed = load_as<i32v>(weight + s * kTileRows * 4);
      for (int i = 0; i < 4; ++i) fn(4 * s + i, (packed << (24 - 8 * i)) >> 24);
    }
  }
};

}  // namespace

void int8_gemm(const QuantizedGemmParams& p) {
  run_quantized_gemm<Int8Format>(p);
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
