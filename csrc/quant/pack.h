// Packing of 4-bit and 8-bit weights into tiles, and the way back. The layouts are described in fused/gemm.h.
#pragma once

#include <cstdint>

#include "fused/gemm.h"

namespace fastinfer {

struct PackParams {
  const void* q;  // [n, k] uint8 0..15 (4 bits) or int8 (8 bits)
  void* out;      // [ceil(n / 16), k / 32, ...]
  int64_t n;
  int64_t k;
  int bits;  // 4 or 8
};

struct DequantizeParams {
  QuantizedWeight weight;
  const int64_t* rows;  // [count] or null for 0..count-1
  void* out;            // [count, k]
  int64_t count;
  int64_t k;
  int bits;     // 4 or 8
  DType dtype;  // of out
};

namespace cpu {
void pack(const PackParams& params);
void dequantize(const DequantizeParams& params);
}  // namespace cpu

}  // namespace fastinfer
