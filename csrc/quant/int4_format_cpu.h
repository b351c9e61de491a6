// How the CPU reads a block of 4-bit weights.
#pragma once

#include "quant/quantized_gemm_cpu.h"

namespace fastinfer::cpu::FASTINFER_ISA {

struct Int4Format {
  static constexpr int kSteps = 4;  // of 8 inputs: low nibbles hold the first four, high ones the others
  static constexpr int kBlockBytes = kSteps * kTileRows * 4;
  static constexpr float kSymmetricMin = -8.0f;

  struct Block {
    u8v q[2 * kSteps];

    FASTINFER_INLINE explicit Block(const uint8_t* weight) {
      for (int s = 0; s < kSteps; ++s) {
        const u8v packed = load_as<u8v>(weight + s * kTileRows * 4);
        q[2 * s] = low_nibbles(packed);
        q[2 * s + 1] = high_nibbles(packed);
      }
    }

    // With 16 inputs, the half-th run of the block.
    FASTINFER_INLINE i32v dot(int half, const int8_t* x, const int32_t* /*total*/) const {
      Int4Dot result;
      for (int i = 0; i < kSteps; ++i) result.add(q[half * kSteps + i], broadcast4(x + 4 * i));
      return result.sum();
    }
  };

  template <class Fn>
  FASTINFER_INLINE static void for_each_input(const uint8_t* weight, Fn&& fn) {
    for (int s = 0; s < kSteps; ++s) {
      const i32v packed = load_as<i32v>(weight + s * kTileRows * 4);
      for (int i = 0; i < 8; ++i) fn(8 * s + i, (packed >> (8 * (i % 4) + 4 * (i / 4))) & 0x0f);
    }
  }
};

}  // namespace fastinfer::cpu::FASTINFER_ISA
