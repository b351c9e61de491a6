// The shared memory of select_largest_cuda.h.
#pragma once

#include <cstddef>

namespace fastinfer::cuda {

// A histogram of a digit of so many bits, in 32 runs with a gap each, and numbers of each warp.
constexpr size_t select_largest_bytes(int threads, int digit_bits) {
  return ((size_t{1} << digit_bits) + 32 + 2 * (static_cast<size_t>(threads) / 32) + 2) * sizeof(int);
}

}  // namespace fastinfer::cuda
