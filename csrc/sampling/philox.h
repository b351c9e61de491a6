// Philox-4x32-10, a counter-based random number generator (Salmon et al., 2011,
// https://doi.org/10.1145/2063384.2063405): the number depends on key and counter alone, so any thread can make it.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace fastinfer {

struct Philox {
  uint32_t words[4];

  FASTINFER_HOST_DEVICE Philox(uint64_t key, uint64_t counter)
      : words{static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), 0, 0} {
    uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
    for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
      const uint64_t p0 = uint64_t{0xD2511F53u} * words[0], p1 = uint64_t{0xCD9E8D57u} * words[2];
      const uint32_t w1 = words[1], w3 = words[3];
      words[0] = static_cast<uint32_t>(p1 >> 32) ^ w1 ^ k0;
      words[1] = static_cast<uint32_t>(p1);
      words[2] = static_cast<uint32_t>(p0 >> 32) ^ w3 ^ k1;
      words[3] = static_cast<uint32_t>(p0);
    }
  }

  // Uniform in [0, 1), 53 bits.
  FASTINFER_HOST_DEVICE double uniform() const {
    return static_cast<double>(((uint64_t{words[0]} << 32) | words[1]) >> 11) * 0x1p-53;
  }
};

}  // namespace fastinfer
