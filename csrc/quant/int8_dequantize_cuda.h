// Dequantises tiles of 8-bit weights on a GPU: from bytes to the A fragments of a 16-bit mma.
#pragma once

#include <type_traits>

#include "common/cuda/dtype.h"
#include "common/cuda/ptx.h"
#include "quant/packed_weight_cuda.h"

namespace fastinfer::cuda {

// q in -128 .. 127, which 16-bit floats hold.
template <class T>
struct Int8Weight : PackedWeight<WeightFormat::kInt8, QuantizedGemmParams> {
  __device__ explicit Int8Weight(const Params& /*p*/) {}

  template <int kChunk>
  __device__ Fragments fragments(const unsigned char* lane_bytes, int row_tile, int block) const {
    const uint4 q = *reinterpret_cast<const uint4*>(lane_bytes + this->template place<kChunk>(row_tile, block));
    Fragments f;
    unpack({q.x, q.y}, f.a[0]);
    unpack({q.z, q.w}, f.a[1]);
    return f;
  }

  // Of 16 inputs, from the lane's bytes of them.
  __device__ void sixteen(const unsigned char* bytes, uint32_t (&a)[4]) const {
    unpack(*reinterpret_cast<const uint2*>(bytes), a);
  }

 private:
  // Of rows g and g + 8.
  __device__ static void unpack(uint2 q, uint32_t (&a)[4]) {
    a[0] = pair(q.x, 0x4140);
    a[1] = pair(q.y, 0x4140);
    a[2] = pair(q.x, 0x4342);
    a[3] = pair(q.y, 0x4342);
  }

  // Two bytes of q as floats; `selector` brings them to the lower halves of the word.
  __device__ static uint32_t pair(uint32_t q, uint32_t selector) {
    if constexpr (std::is_same_v<T, __half>) {
      // 0x6400 | u is 1024 + u for the byte u = q + 128.
      return sub2<T>(prmt(q ^ 0x80808080u, 0x64u, selector), 0x64806480u);
    } else {
      // Seven bits fit behind a bf16's exponent: 0x4300 | (q & 127) is 128 + (q & 127), and 0x4300 | (q & 128) is
      // 128, or 256 where q is negative.
      const uint32_t bytes = prmt(q, 0, selector);
      return sub2<T>(lop3<0xea>(bytes, 0x007f007fu, 0x43004300u), lop3<0xea>(bytes, 0x00800080u, 0x43004300u));
    }
  }
};

}  // namespace fastinfer::cuda
