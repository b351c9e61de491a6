// Reads and dequantises a block of 4-bit weights on the CPU.
#pragma once

#include "quant/unsigned_format_cpu.h"

namespace fastinfer::cpu::FASTINFER_ISA {

struct Int4Format : UnsignedFormat<Int4Format> {
  static constexpr int kSteps = 4;  // 8 inputs each: low nibbles hold the first four, high ones the others
  static constexpr int kBlockBytes = kSteps * kTileRows * 4;
  static constexpr float kSymmetricOffset = 8.0f;  // a weight without minimum is scale * (q - 8)

  FASTINFER_INLINE static RunBytes load_run(const uint8_t* block, int run) {
    const uint8_t* packed = block + run * (kBlockBytes / 2);
    const u8v first = in_register(load_as<u8v>(packed));  // or GCC loads it twice
    const u8v second = in_register(load_as<u8v>(packed + kTileRows * 4));
    return {{low_nibbles(first), high_nibbles(first), low_nibbles(second), high_nibbles(second)}};
  }

  template <class Fn>
  FASTINFER_INLINE static void for_each_input(const uint8_t* weight, Fn&& fn) {
    for (int s = 0; s < kSteps; ++s) {
      const i32v packed = load_as<i32v>(weight + s * kTileRows * 4);
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) fn(8 * s + i, (packed >> (8 * (i % 4) + 4 * (i / 4))) & 0x0f);
    }
  }
};

}  // namespace fastinfer::cpu::FASTINFER_ISA
