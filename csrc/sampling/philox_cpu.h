// Philox in vectors: kPhiloxLanes of them at once, in lanes of 64 bits that each hold a word of 32, as the product of
// two words needs.
#pragma once

#include "common/cpu/vec.h"
#include "sampling/philox.h"

namespace fastinfer::cpu::FASTINFER_ISA {

typedef uint64_t u64v __attribute__((vector_size(kLanes * 4)));
inline constexpr int kPhiloxLanes = kLanes / 2;

// Writes the words of the Philox with the indices index, index + 1, ...
FASTINFER_INLINE void philox(uint64_t key, uint64_t counter, uint32_t index, uint32_t stream,
                             uint32_t (&words)[4 * kPhiloxLanes]) {
  constexpr uint64_t kLow = 0xffffffffu;
  u64v w0 = u64v{} + (counter & kLow), w1 = u64v{} + (counter >> 32), w2, w3 = u64v{} + stream;
  for (int i = 0; i < kPhiloxLanes; ++i) w2[i] = index + static_cast<uint32_t>(i);
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round, k0 += kPhiloxW0, k1 += kPhiloxW1) {
    const u64v p0 = w0 * uint64_t{kPhiloxM0}, p1 = w2 * uint64_t{kPhiloxM1};
    w0 = (p1 >> 32) ^ w1 ^ uint64_t{k0};
    w1 = p1 & kLow;
    w2 = (p0 >> 32) ^ w3 ^ uint64_t{k1};
    w3 = p0 & kLow;
  }
  for (int i = 0; i < kPhiloxLanes; ++i) {
    words[4 * i] = static_cast<uint32_t>(w0[i]);
    words[4 * i + 1] = static_cast<uint32_t>(w1[i]);
    words[4 * i + 2] = static_cast<uint32_t>(w2[i]);
    words[4 * i + 3] = static_cast<uint32_t>(w3[i]);
  }
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
