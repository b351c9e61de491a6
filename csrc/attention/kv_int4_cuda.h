// The GPU's side of kv_int4_cpu.h: the same scales, the same rounding.
#pragma once

#include <cuda_fp16.h>

#include <cfloat>
#include <cstring>

#include "attention/kv_int4.h"
#include "common/cuda/ptx.h"

namespace fastinfer::cuda {

// The parameters that round the elements of a group.
struct Int4Rounding {
  uint32_t scale;  // and the minimum in the upper half: Int4Scale's bits
  float minimum;
  float inverse;  // 0 where all codes become 0

  __device__ Int4Rounding(float lowest, float largest) {
    __half2 pair;
    pair.y = __float2half_rn(lowest + 0.0f);  // + 0: -0 becomes 0, here and below
    minimum = __half2float(pair.y);
    pair.x = __float2half_rn((fmaxf(largest - minimum, 0.0f) + 0.0f) / kInt4Levels);
    const float step = __half2float(pair.x), top = minimum + step * kInt4Levels;
    const bool valid = lowest >= -kInt4Limit && top <= kInt4Limit;
    memcpy(&scale, &pair, sizeof scale);
    if (!valid) scale = 0x7e007e00u;  // NaN
    inverse = valid && step > 0.0f ? 1.0f / step : 0.0f;
  }

  // Half to even.
  __device__ uint32_t code(float x) const {
    return inverse > 0.0f ? static_cast<uint32_t>(__float2int_rn(fminf(fmaxf((x - minimum) * inverse, 0.0f), 15.0f)))
                          : 0u;
  }
};

// Eight codes to four words of fp16: times the scale and plus the minimum in one rounding. 0x6400 | q is 1024 + q.
__device__ inline void widen_int4(uint32_t codes, uint32_t scale, uint32_t (&out)[4]) {
  const uint32_t factor = prmt(scale, 0, 0x1010), minimum = prmt(scale, 0, 0x3232);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t pair = prmt(codes, codes >> 4, i | (4 + i) << 8);  // byte i, and its upper half
    out[i] = fma2<__half>(sub2<__half>((pair & 0x000f000fu) | 0x64006400u, 0x64006400u), factor, minimum);
  }
}

}  // namespace fastinfer::cuda
