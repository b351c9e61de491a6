// Unpacking of quantised rows of a GGUF file: integers with a scale, and perhaps a minimum, per group of 32 inputs. The
// result is row by row, or already in the CPU's packed layout. python/fastinfer/formats/gguf_rows.py says what becomes
// of each storage type.
#pragma once

#include <cstdint>

#include "common/api.h"
#include "common/dtype.h"

namespace fastinfer {

// A storage type with quantised blocks.
struct GGUFBlock {
  int64_t inputs;      // 32, 64, 128 or 256
  int64_t bytes;       // in the file
  int bits;            // of the integers: 4 or 8
  bool has_mins;       // whether groups have minimums once they are unpacked
  bool groups_of_16;   // two of which are joined
  int two_level_bits;  // of the integers, if the block can be packed with two-level scales, as it stores them: 4 to 6
  int packed_bits;     // of the integers once they are packed for the CPU with scales of one level: 4, 5 or 8
};

struct GGUFRowsParams {
  const uint8_t* file;
  const int64_t* offsets;  // [n] of each row in the file
  const uint8_t* types;    // [n] the rows' storage types, for which gguf_block is not null
  int64_t n;
  int64_t k;  // a multiple of the types' blocks
  int bits;   // of the packed integers, where all types have those
  bool packed;
  DType scale_dtype;  // fp16 or fp32
  void* q;            // [n, k], or packed as by int4_pack, int5_pack or int8_pack
  void* scales;       // [n, k / 32], or packed as by pack_scales: [ceil(n / 16), k / 32, 16]
  void* mins;         // as scales, or null if the types have none
};

struct GGUFTwoLevelParams {
  const uint8_t* file;
  const int64_t* offsets;  // [n] of each row in the file
  int type;                // of all rows, with two_level_bits
  int64_t n;
  int64_t k;        // a multiple of 256
  void* q;          // packed as by int4_pack, int5_pack or int6_pack
  uint8_t* scales;  // packed as by pack_two_level_scales
  uint8_t* mins;    // the same, or null if the type has none
};

struct GGUFValuesParams {
  const uint8_t* file;
  const int64_t* offsets;  // [n]
  const uint8_t* types;    // [n], with groups of 16
  int64_t n;
  int64_t k;
  float* values;  // [n, k]
};

FASTINFER_API const GGUFBlock* gguf_block(int type);  // null if the type is unknown or not quantised

namespace cpu {
// Returns false if a scale or minimum that was computed does not fit into fp16; the results are then of no use.
FASTINFER_API bool unpack_gguf_rows(const GGUFRowsParams& params);
// Packs rows for the CPU without computing anything.
FASTINFER_API void pack_gguf_two_level(const GGUFTwoLevelParams& params);
// Computes scale * q + min in fp32.
FASTINFER_API void dequantize_gguf_rows(const GGUFValuesParams& params);
}  // namespace cpu

}  // namespace fastinfer
