// What the L2 of a GPU does with the data of a copy (cp_async_under in common/cuda/ptx.h).
#pragma once

#include <cstdint>

namespace fastinfer::cuda {

// The values that ptxas computes for createpolicy.fractional.L2::evict_first and evict_normal with the fraction 1.
inline constexpr uint64_t kEvictFirst = 0x12f0000000000000u, kEvictNormal = 0x10f0000000000000u;

// The policy for weights. Those that only one block reads leave the L2 first: activations, and weights that several
// blocks read, are to stay there.
constexpr uint64_t weight_policy(bool read_once) {
  return read_once ? kEvictFirst : kEvictNormal;
}

}  // namespace fastinfer::cuda
