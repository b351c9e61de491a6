// Dequantises tiles of 4-bit look-up table weights on a GPU: from indices to the A fragments of a 16-bit mma.
#pragma once

#include "common/cuda/ptx.h"
#include "quant/packed_weight_cuda.h"

namespace fastinfer::cuda {

// q is an index into 16 numbers, rounded to 16 bits. A table of all pairs of them, which a byte of q picks from, lies
// at the beginning of the block's shared memory, once for every lane, so that no two lanes meet in a bank:
//
//   byte modulo 128    0         4               124
//   pair 0             | lane 0  | lane 1  | ... | lane 31 |
//   pair 1             | lane 0  | lane 1  | ... | lane 31 |
//
// A pair is the entry of the lower nibble, then that of the upper one. The threads write the table when the weight is
// constructed; a barrier must follow before it is read.
template <class T>
struct LutWeight : PackedWeight<WeightFormat::kLut, LutGemmParams> {
  __device__ explicit LutWeight(const Params& p) {
    auto* const table = reinterpret_cast<uint4*>(dynamic_shared());
    for (int i = threadIdx.x; i < 256; i += blockDim.x) {
      const uint32_t pair = pack2<T>(p.table[i % 16], p.table[i / 16]);
      for (int j = 0; j < 8; ++j) {  // neighbours write to different banks
        table[i * 8 + (i + j) % 8] = make_uint4(pair, pair, pair, pair);
      }
    }
  }

  template <int kChunk>
  __device__ Fragments fragments(const unsigned char* lane_bytes, int row_tile, int block) const {
    const uint2 q = *reinterpret_cast<const uint2*>(lane_bytes + this->template place<kChunk>(row_tile, block));
    Fragments f;
    look_up(q.x, f.a[0]);
    look_up(q.y, f.a[1]);
    return f;
  }

  // Of 16 inputs, from the lane's bytes of them.
  __device__ void sixteen(const unsigned char* bytes, uint32_t (&a)[4]) const {
    look_up(*reinterpret_cast<const uint32_t*>(bytes), a);
  }

 private:
  __device__ void look_up(uint32_t q, uint32_t (&a)[4]) const {
    const uint32_t shifted[4] = {q << 7, q >> 1, q >> 9, q >> 17};
    uint32_t pairs[4];  // nibbles 0 and 1, 2 and 3, ...
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t place = lop3<0xea>(shifted[i], 0x7f80u, threadIdx.x % kWarpSize * 4);
      pairs[i] = *reinterpret_cast<const uint32_t*>(dynamic_shared() + place);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // nibbles i and i + 4 belong together
      a[2 * i] = prmt(pairs[i], pairs[i + 2], 0x5410);
      a[2 * i + 1] = prmt(pairs[i], pairs[i + 2], 0x7632);
    }
  }
};

}  // namespace fastinfer::cuda
