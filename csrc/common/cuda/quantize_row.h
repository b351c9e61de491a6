// The GPU's side of common/cpu/quantize_row.h: the same scales, the same rounding.
#pragma once

#include <cuda_fp8.h>

#include <cfloat>

#include "common/cuda/reduce.h"
#include "common/cuda/row.h"

namespace fastinfer::cuda {

template <class Q>
inline constexpr float kLargestQuantized = 127.0f;
template <>
inline constexpr float kLargestQuantized<__nv_fp8_e4m3> = 448.0f;

// Half to even.
template <>
__device__ inline int8_t from_float<int8_t>(float value) {
  return static_cast<int8_t>(__float2int_rn(value));
}
template <>
__device__ inline __nv_fp8_e4m3 from_float<__nv_fp8_e4m3>(float value) {
  return __nv_fp8_e4m3(value);  // saturates
}

// Magnitudes as integers have the order of the numbers, with NaN above all. (fmaxf would lose a NaN.)
__device__ inline uint32_t magnitude_bits(float value) {
  return __float_as_uint(value) & 0x7fffffffu;
}

struct RowScale {
  float scale;
  float inverse;  // 0 where the row becomes zeros

  __device__ float apply(float x) const {
    return inverse > 0.0f ? x * inverse : 0.0f;  // x may be NaN
  }
};

template <class Q>
__device__ RowScale row_scale(uint32_t largest_bits) {
  const float amax = __uint_as_float(largest_bits), inverse = kLargestQuantized<Q> / amax;
  if (amax > 0.0f && amax <= FLT_MAX && inverse <= FLT_MAX) return {amax / kLargestQuantized<Q>, inverse};
  return {amax <= FLT_MAX ? 0.0f : __uint_as_float(0x7fc00000u), 0.0f};
}

// Largest over the block, for every thread. blockDim.x must be a multiple of 32; warp_values is shared memory of one
// word per warp, which must not be in use.
__device__ inline uint32_t block_max(uint32_t value, uint32_t* warp_values) {
  const auto warp_max = [](uint32_t v) {
    for (int offset = kWarpSize / 2; offset > 0; offset /= 2) v = max(v, __shfl_xor_sync(kFullMask, v, offset));
    return v;
  };
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  value = warp_max(value);
  if (lane == 0) warp_values[warp] = value;
  __syncthreads();
  const int warps = blockDim.x / kWarpSize;
  return warp_max(lane < warps ? warp_values[lane] : 0u);
}

}  // namespace fastinfer::cuda
