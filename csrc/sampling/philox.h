// Philox-4x32-10, a counter-based random number generator (Salmon et al., 2011,
// https://doi.org/10.1145/2063384.2063405): the numbers depend on key and counter alone, so any thread can make them.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace fastinfer {

// Multipliers, and what is added to the two halves of the key after each round.
inline constexpr uint32_t kPhiloxM0 = 0xD2511F53u, kPhiloxM1 = 0xCD9E8D57u;
inline constexpr uint32_t kPhiloxW0 = 0x9E3779B9u, kPhiloxW1 = 0xBB67AE85u;

struct Philox {
  uint32_t words[4];

  // The counter has 128 bits: `counter`, `index` and `stream`.
  FASTINFER_HOST_DEVICE Philox(uint64_t key, uint64_t counter, uint32_t index, uint32_t stream)
      : words{static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), index, stream} {
    uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
    for (int round = 0; round < 10; ++round, k0 += kPhiloxW0, k1 += kPhiloxW1) {
      const uint64_t p0 = uint64_t{kPhiloxM0} * words[0], p1 = uint64_t{kPhiloxM1} * words[2];
      const uint32_t w1 = words[1], w3 = words[3];
      words[0] = static_cast<uint32_t>(p1 >> 32) ^ w1 ^ k0;
      words[1] = static_cast<uint32_t>(p1);
      words[2] = static_cast<uint32_t>(p0 >> 32) ^ w3 ^ k1;
      words[3] = static_cast<uint32_t>(p0);
    }
  }

  // words[i], for an i that is not known when compiling: an array so indexed would leave a GPU's registers.
  FASTINFER_HOST_DEVICE uint32_t word(int i) const {
    return i < 2 ? (i == 0 ? words[0] : words[1]) : (i == 2 ? words[2] : words[3]);
  }
};

}  // namespace fastinfer
