// Dequantises tiles of 4-bit weights on a GPU: from nibbles to the A fragments of a 16-bit mma.
#pragma once

#include <type_traits>

#include "common/cuda/dtype.h"
#include "common/cuda/ptx.h"
#include "quant/packed_weight_cuda.h"

namespace fastinfer::cuda {

// q - 8 or, where the weight has minimums, q.
template <class T>
struct Int4Weight : PackedWeight<WeightFormat::kInt4, QuantizedGemmParams> {
  uint32_t low_zero, high_zero;

  __device__ explicit Int4Weight(const Params& p) {
    const bool symmetric = p.weight.mins == nullptr;
    if constexpr (std::is_same_v<T, __half>) {
      low_zero = opaque(symmetric ? 0x64086408u : 0x64006400u);   // 1024 + 8, 1024
      high_zero = opaque(symmetric ? 0xd480d480u : 0xd400d400u);  // -(64 + 8), -64
    } else {
      low_zero = high_zero = opaque(symmetric ? 0xc308c308u : 0xc300c300u);  // -(128 + 8), -128
    }
  }

  template <int kChunk>
  __device__ Fragments fragments(const unsigned char* lane_bytes, int row_tile, int block) const {
    const uint2 q = *reinterpret_cast<const uint2*>(lane_bytes + this->template place<kChunk>(row_tile, block));
    Fragments f;
    unpack(q.x, f.a[0]);
    unpack(q.y, f.a[1]);
    return f;
  }

  // Of 16 inputs, from the lane's bytes of them.
  __device__ void sixteen(const unsigned char* bytes, uint32_t (&a)[4]) const {
    unpack(*reinterpret_cast<const uint32_t*>(bytes), a);
  }

 private:
  __device__ void unpack(uint32_t q, uint32_t (&a)[4]) const {
    if constexpr (std::is_same_v<T, __half>) {
#pragma unroll
      for (int i = 0; i < 4; i += 2, q >>= 8) {
        // Ten bits fit behind the exponent: 1024 + u, and for the nibble above 1024 + 16 u, which a sixteenth mends.
        a[i] = sub2<T>(lop3<0xea>(q, 0x000f000fu, 0x64006400u), low_zero);
        a[i + 1] = fma2<T>(lop3<0xea>(q, 0x00f000f0u, 0x64006400u), 0x2c002c00u, high_zero);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i, q >>= 4) {
        a[i] = fma2<T>(lop3<0xea>(q, 0x000f000fu, 0x43004300u), 0x3f803f80u, low_zero);  // 1 (128 + u) - 128
      }
    }
  }
};

}  // namespace fastinfer::cuda
