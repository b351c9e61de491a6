// Packing of 4-bit, 6-bit and 8-bit weights into tiles, and the way back. A packed weight has the same shape on every
// device: tiles of 16 rows, blocks of 32 inputs, 256 (4 bits), 384 (6 bits, CPU only) or 512 (8 bits) bytes a block.
// quant/quantized_gemm.h describes the CPU's order within a block. On a GPU a block lies as the lanes of a warp hold
// it: with g = lane / 4 and t = lane % 4,
//
//   8 bits: 16 bytes a lane, the A fragment of mma m16n8k32: four inputs each of (row g, inputs 4t ..), (row g + 8,
//           inputs 4t ..), (row g, inputs 4t + 16 ..), (row g + 8, inputs 4t + 16 ..).
//   4 bits: 8 bytes a lane, the same 16 values: one word for inputs 4t .. 4t + 3, one for those 16 further on. Nibbles
//   i
//           and i + 4 of a word are the pair that becomes register i of a 16-bit mma: (row g, inputs 0, 1), (row g + 8,
//           inputs 0, 1), (row g, inputs 2, 3), (row g + 8, inputs 2, 3), so that two come out with one mask.
#pragma once

#include <cstdint>

#include "common/api.h"
#include "quant/quantized_gemm.h"

namespace fastinfer {

struct PackParams {
  const void* q;  // [n, k] uint8 0..15 (4 bits) or 0..31 (5 bits), int8 -32..31 (6 bits) or int8 (8 bits)
  void* out;      // [ceil(n / 16), k / 32, ...]
  int64_t n;
  int64_t k;
  int bits;  // 4, 5, 6 or 8
};

struct DequantizeParams {
  QuantizedWeight weight;
  const int64_t* rows;  // [count] or null for 0..count-1
  void* out;            // [count, k]
  int64_t count;
  int64_t n;
  int64_t k;
  int bits;     // 4, 5, 6 or 8
  DType dtype;  // of out
};

namespace cpu {
FASTINFER_API void pack(const PackParams& params);
FASTINFER_API void dequantize(const DequantizeParams& params);
}  // namespace cpu

namespace cuda {
FASTINFER_API void pack(const PackParams& params, void* stream);
FASTINFER_API void dequantize(const DequantizeParams& params, void* stream);
}  // namespace cuda

}  // namespace fastinfer
