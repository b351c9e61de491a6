// Reductions over a warp and a block.
#pragma once

namespace fastinfer::cuda {

inline constexpr int kWarpSize = 32;
inline constexpr unsigned kFullMask = 0xffffffffu;

template <class T>
__device__ inline T warp_sum(T value) {
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(kFullMask, value, offset);
  return value;
}

__device__ inline float warp_max(float value) {
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    value = fmaxf(value, __shfl_xor_sync(kFullMask, value, offset));
  }
  return value;
}

// Sum over the block, returned to every thread. blockDim.x must be a multiple of 32; warp_sums is shared memory of one
// number per warp, which a second call may use after a __syncthreads.
template <class T>
__device__ inline T block_sum(T value, T* warp_sums) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  value = warp_sum(value);
  if (lane == 0) warp_sums[warp] = value;
  __syncthreads();
  const int warps = blockDim.x / kWarpSize;
  return warp_sum(lane < warps ? warp_sums[lane] : T{});
}

}  // namespace fastinfer::cuda
