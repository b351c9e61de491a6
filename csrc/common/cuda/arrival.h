// How the blocks that share a result find out which of them comes last. That one may read what the others have written,
// and finishes the work; no block waits for another.
#pragma once

#include <cstdint>

namespace fastinfer::cuda {

// All threads of a block call this once the block has written its part. Returns true in the last of `blocks` blocks.
// The counter is zero before, and is zero again after the last arrival. `flag` is shared memory that nobody else uses
// until the block's next barrier.
__device__ inline bool last_to_arrive(uint32_t* counter, int blocks, int* flag) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    const bool last = atomicAdd(counter, 1) + 1 == static_cast<uint32_t>(blocks);
    if (last) atomicExch(counter, 0u);
    *flag = last;
    __threadfence();
  }
  __syncthreads();
  __threadfence();
  return *flag != 0;
}

}  // namespace fastinfer::cuda
