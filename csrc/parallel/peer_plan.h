// Launch policy of exchanges between GPUs. It must not depend on the GPU: all ranks choose the same.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "common/launch_config.h"
#include "parallel/peer_group.h"

namespace fastinfer::cuda {

inline constexpr unsigned kExchangeThreads = 512;

// Every rank reads the parts of all others and adds them up: one barrier, (size - 1) bytes over the links for each byte
// of the sum. Or each adds up its share and reads the others' sums: two barriers, 2 (size - 1) / size bytes. With two
// ranks the bytes are the same. With more the second form wins from some hundred KB on, by what is published of other
// kernels of this kind; our own have not yet run on several GPUs. Returns the bytes of the largest sum for the first
// form.
inline int64_t one_shot_bytes(int64_t size) {
  return size <= 2 ? INT64_MAX : size <= 4 ? 512 << 10 : 256 << 10;
}

// A vector for each thread, as far as there are blocks.
inline LaunchConfig plan_exchange(int64_t vectors) {
  const int64_t threads = std::min<int64_t>((vectors + 31) / 32 * 32, kExchangeThreads);
  return {
      .grid = std::min<int64_t>((vectors + kExchangeThreads - 1) / kExchangeThreads, parallel::kMaxExchangeBlocks),
      .block = static_cast<unsigned>(threads),
      .dependent = true,
  };
}

// Ranks that used accesses of different sizes would share an exchange out differently, so addresses decide nothing.
inline void check_exchanged(const char* op, const void* x, const void* out) {
  for (const void* p : {x, out}) {
    if (reinterpret_cast<uintptr_t>(p) % 16 == 0) continue;
    throw std::runtime_error(std::string(op) + ": x and out must begin at multiples of 16 bytes on a GPU");
  }
}

}  // namespace fastinfer::cuda
