// Dequantises tiles of 4-bit look-up table weights on a GPU: from indices to the A fragments of a 16-bit mma.
#pragma once

#include "common/cuda/dtype.h"
#include "common/cuda/ptx.h"
#include "quant/packed_weight_cuda.h"

namespace fastinfer::cuda {

// q is an index into 16 numbers, rounded to 16 bits. They stay in eight registers, lower and upper bytes apart: a byte
// permutation looks up four of eight entries at once.
template <class T>
struct LutWeight : PackedWeight<WeightFormat::kLut, LutGemmParams> {
  uint32_t lower[4] = {}, upper[4] = {};

  __device__ explicit LutWeight(const Params& p) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const T value = from_float<T>(p.table[i]);
      unsigned short bits;
      memcpy(&bits, &value, sizeof bits);
      lower[i / 4] |= (bits & 0xffu) << (i % 4 * 8);
      upper[i / 4] |= (bits >> 8u) << (i % 4 * 8);
    }
  }

  template <int kChunk>
  __device__ Fragments fragments(const unsigned char* stage, int row_tile, int block) const {
    const uint2 q = *reinterpret_cast<const uint2*>(this->template at<kChunk>(stage, row_tile, block));
    Fragments f;
    look_up(q.x, f.a[0]);
    look_up(q.y, f.a[1]);
    return f;
  }

 private:
  __device__ void look_up(uint32_t q, uint32_t (&a)[4]) const {
    uint32_t pairs[2][2];  // nibbles 0, 1 and 2, 3; 4, 5 and 6, 7
#pragma unroll
    for (int half = 0; half < 2; ++half, q >>= 16) {
      const uint32_t index = q & 0x7777u;
      const uint32_t above = prmt(0xff00u, 0, q >> 3 & 0x1111u);  // bytes of ones where the index is 8 or more
      const uint32_t low = lop3<0xca>(above, prmt(lower[2], lower[3], index), prmt(lower[0], lower[1], index));
      const uint32_t high = lop3<0xca>(above, prmt(upper[2], upper[3], index), prmt(upper[0], upper[1], index));
      pairs[half][0] = prmt(low, high, 0x5140);
      pairs[half][1] = prmt(low, high, 0x7362);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      a[2 * i] = prmt(pairs[0][i], pairs[1][i], 0x5410);
      a[2 * i + 1] = prmt(pairs[0][i], pairs[1][i], 0x7632);
    }
  }
};

}  // namespace fastinfer::cuda
