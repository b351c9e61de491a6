// Linear layers over packed weights: 8, 6, 5 and 4 bits, and 4-bit indices into a look-up table.
#pragma once

#include <cstdint>

#include "common/api.h"
#include "common/cpu/isa.h"
#include "common/dtype.h"
#include "gemm/gemm.h"

namespace fastinfer {

inline constexpr int kTwoLevelInputs = 256;  // that share the fp16 of a two-level scale

// Stands for a scale that is an int8 times an fp16: the int8 belongs to a group of kGroup inputs, the fp16 to 256.
template <int kGroup>
struct TwoLevel {
  static constexpr int kGroups = kTwoLevelInputs / kGroup;
};

// w = scale * q + min (8 bits), scale * q (6 bits), scale * q + min or scale * (q - 16) (5 bits), scale * q + min or
// scale * (q - 8) (4 bits). The CPU's layout: see quant/pack.h for a GPU's.
struct QuantizedWeight {
  const void* q;         // [tiles, k / 32, bits, 16, 4], int8 for 8 bits, else uint8
  const void* scales;    // [tiles, groups, 16]; two-level: [tiles, k / 256, 2 + 256 / group, 16] int8
  const void* mins;      // as scales, or null
  int64_t group_blocks;  // blocks of 32 inputs that share a scale; 1 for int6, whose groups are half a block
  DType scale_dtype;     // of scales and mins, unless they are two-level: fp16 or fp32
  int groups;            // of a row; 0 if the scales are two-level: on a CPU always for int6, perhaps for int4, int5
  uint64_t group_reciprocal;  // CUDA: 2^32 / group_blocks, rounded up

  // On a GPU: the group of a block of 32 inputs. A division by multiplication, exact as long as block * group_blocks <
  // 2^32.
  FASTINFER_HOST_DEVICE int group_of(int block) const {
    return static_cast<int>(static_cast<uint32_t>(block) * group_reciprocal >> 32);
  }

  bool has_two_levels() const {
    return groups == 0;
  }
};

struct QuantizedGemmParams : GemmParams {
  QuantizedWeight weight;
  int activation_bits;  // 32: fp32 products; 16 (of which 14 are used) or 8: integer ones, a scale per row and 16
                        // inputs
};

struct LutGemmParams : QuantizedGemmParams {  // w = scale * table[q], 4 bits
  const float* table;                         // [16]; integers -128..127 unless activation_bits is 32
};

}  // namespace fastinfer

FASTINFER_CPU_KERNEL_TILES(int8_gemm, QuantizedGemmParams)
FASTINFER_CPU_KERNEL_TILES(int6_gemm, QuantizedGemmParams)
FASTINFER_CPU_KERNEL_TILES(int5_gemm, QuantizedGemmParams)
FASTINFER_CPU_KERNEL_TILES(int4_gemm, QuantizedGemmParams)
FASTINFER_CPU_KERNEL_TILES(lut_gemm, LutGemmParams)

namespace fastinfer::cuda {
FASTINFER_API void int8_gemm(const QuantizedGemmParams& params, void* stream);
FASTINFER_API void int4_gemm(const QuantizedGemmParams& params, void* stream);
FASTINFER_API void lut_gemm(const LutGemmParams& params, void* stream);
}  // namespace fastinfer::cuda
