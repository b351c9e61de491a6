// How the blocks that share a result find out which of them comes last. That one may read what the others have written,
// and finishes the work; no block waits for another.
#pragma once

#include <cstdint>

#include "common/cuda/ptx.h"

namespace fastinfer::cuda {

// All threads of a block call this once the block has written its part. Returns true in the last of `blocks` blocks.
// The counter is zero before, and is zero again after the last arrival.
__device__ inline bool last_to_arrive(uint32_t* counter, int blocks) {
  __syncthreads();
  bool last = false;
  if (threadIdx.x == 0) {
    last = add_acquire_release(counter, 1) + 1 == static_cast<uint32_t>(blocks);
    if (last) *counter = 0;
  }
  return __syncthreads_or(last) != 0;
}

}  // namespace fastinfer::cuda
