// The rotation of keys and queries by one warp, see key_codes.h.
#pragma once

#include "attention/key_codes.h"
#include "common/cuda/quantize_row.h"
#include "common/cuda/reduce.h"

namespace fastinfer::cuda {

struct KeyLevel {};
template <>
inline constexpr float kLargestQuantized<KeyLevel> = kLargestKeyLevel;

// Replaces each run of a row in shared memory, which the warp has written, by its product with the Hadamard matrix,
// without a factor. Sums are formed as on the CPU. All lanes of the warp call it.
__device__ inline void rotate_by_warp(float* row, int head_dim) {
  const int lane = static_cast<int>(threadIdx.x % kWarpSize);
  for (int step = 1; step < hadamard_size(head_dim); step *= 2) {
    __syncwarp();
    for (int i = lane; i < head_dim / 2; i += kWarpSize) {
      float* const pair = row + i / step * 2 * step + i % step;
      const float a = pair[0], b = pair[step];
      pair[0] = a + b;
      pair[step] = a - b;
    }
  }
  __syncwarp();
}

// The bits of the largest magnitude of a row.
__device__ inline uint32_t largest_of_row(const float* row, int head_dim) {
  uint32_t largest = 0;
  for (int i = static_cast<int>(threadIdx.x % kWarpSize); i < head_dim; i += kWarpSize) {
    largest = max(largest, magnitude_bits(row[i]));
  }
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    largest = max(largest, __shfl_xor_sync(kFullMask, largest, offset));
  }
  return largest;
}

}  // namespace fastinfer::cuda
