// The weight formats of the GPU's matrix products. A format brings its part of a pipeline stage to shared memory, and
// yields the A fragments of 16 rows by 32 inputs as exact 16-bit numbers (scales come later), for two mma of 16 inputs.
//
// Within those 16 inputs the order is not mma's: a lane's inputs 4t .. 4t + 3 stand where the instruction has 2t, 2t +
// 1, 2t + 8, 2t + 9. A sum does not mind, if the activations come in the same order; and both sides become 8-byte
// reads.
#pragma once

#include <type_traits>

#include "common/cuda/dtype.h"
#include "common/cuda/ptx.h"
#include "common/cuda/reduce.h"
#include "fused/gemm.h"
#include "fused/gemm_plan.h"

namespace fastinfer::cuda {

inline constexpr int kGemmRowTiles = kGemmRows / kTileRows;

struct Fragments {
  uint32_t a[2][4];  // inputs 0 .. 15, then 16 .. 31
};

// [n, k], row by row.
template <class T>
struct DenseWeight {
  using Params = DenseGemmParams;
  static constexpr WeightFormat kFormat = WeightFormat::kDense;

  __device__ explicit DenseWeight(const Params& /*p*/) {}

  // 128 rows of a chunk of an expert's slice, by all threads; zeros past its end.
  template <int kChunk, int kThreads>
  __device__ static void load(unsigned char* stage, const Params& p, int expert, int row_unit, int chunk) {
    constexpr int kPieces = kChunk / 8, kRowBytes = shared_row_bytes(kChunk), kRows = kThreads / kPieces;
    static_assert(kRows % 4 == 0);
    const int thread = opaque(threadIdx.x), row = written_row(kChunk, thread / kPieces), piece = thread % kPieces;
    const int first_row = row_unit * kGemmRows + row, input = chunk * kChunk + piece * 8;
    const int n = static_cast<int>(p.n), k = static_cast<int>(p.k);
    const T* from = static_cast<const T*>(p.weight);
    const T* at = from + (static_cast<int64_t>(expert) * n + first_row) * k + input;
    unsigned char* to = stage + row * kRowBytes + piece * 16;
    for (int i = 0; i < kGemmRows; i += kRows, at += kRows * p.k, to += kRows * kRowBytes) {
      const bool valid = first_row + i < n && input < k;
      cp_async_streaming(to, valid ? at : from, valid);
    }
  }

  template <int kChunk>
  __device__ Fragments fragments(const unsigned char* stage, int row_tile, int block) const {
    const int lane = threadIdx.x % kWarpSize, g = lane / 4, t = lane % 4;
    constexpr int kRowBytes = shared_row_bytes(kChunk);
    const unsigned char* row = stage + (row_tile * kTileRows + g) * kRowBytes + (block * kBlockInputs + 4 * t) * 2;
    Fragments f;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const uint2 upper = *reinterpret_cast<const uint2*>(row + 32 * j);
      const uint2 lower = *reinterpret_cast<const uint2*>(row + 8 * kRowBytes + 32 * j);
      f.a[j][0] = upper.x;
      f.a[j][1] = lower.x;
      f.a[j][2] = upper.y;
      f.a[j][3] = lower.y;
    }
    return f;
  }
};

// The packed forms; quant/pack.h describes their bytes.
template <WeightFormat kFormat_, class Params_>
struct PackedWeight {
  using Params = Params_;
  static constexpr WeightFormat kFormat = kFormat_;
  static constexpr int kBlockBytes = kTileRows * kBlockInputs * packed_bits(kFormat) / 8;

  // The blocks of a chunk lie together, row tile by row tile.
  template <int kChunk, int kThreads>
  __device__ static void load(unsigned char* stage, const Params& p, int expert, int row_unit, int chunk) {
    constexpr int kBlocks = kChunk / kBlockInputs, kPieces = kBlocks * kBlockBytes / 16, kTiles = kThreads / kPieces;
    const int thread = opaque(threadIdx.x), tile = thread / kPieces, byte = thread % kPieces * 16;
    const int tiles = (static_cast<int>(p.n) + kTileRows - 1) / kTileRows,
              blocks = static_cast<int>(p.k) / kBlockInputs;
    const int first_tile = row_unit * kGemmRowTiles + tile, first_block = chunk * kBlocks;
    const auto* from = static_cast<const unsigned char*>(p.weight.q);
    const unsigned char* at =
        from + ((static_cast<int64_t>(expert) * tiles + first_tile) * blocks + first_block) * kBlockBytes + byte;
    const bool inside = first_block + byte / kBlockBytes < blocks;
    const int64_t step = static_cast<int64_t>(blocks) * (kTiles * kBlockBytes);
    unsigned char* to = stage + thread * 16;
    for (int i = 0; i < kGemmRowTiles; i += kTiles, at += step, to += kThreads * 16) {
      const bool valid = first_tile + i < tiles && inside;
      cp_async_streaming(to, valid ? at : from, valid);
    }
  }

  // The bytes of this lane.
  template <int kChunk>
  __device__ static const unsigned char* at(const unsigned char* stage, int row_tile, int block) {
    return stage + (row_tile * (kChunk / kBlockInputs) + block) * kBlockBytes +
           threadIdx.x % kWarpSize * (kBlockBytes / 32);
  }
};

// q in -128 .. 127, which 16-bit floats hold.
template <class T>
struct Int8Weight : PackedWeight<WeightFormat::kInt8, QuantizedGemmParams> {
  __device__ explicit Int8Weight(const Params& /*p*/) {}

  template <int kChunk>
  __device__ Fragments fragments(const unsigned char* stage, int row_tile, int block) const {
    const uint4 q = *reinterpret_cast<const uint4*>(this->template at<kChunk>(stage, row_tile, block));
    const uint32_t words[4] = {q.x, q.y, q.z, q.w};
    Fragments f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      f.a[i / 2][i % 2] = pair(words[i], 0x4140);
      f.a[i / 2][i % 2 + 2] = pair(words[i], 0x4342);
    }
    return f;
  }

 private:
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

// q - 8 or, where the weight has minimums, q.
template <class T>
struct Int4Weight : PackedWeight<WeightFormat::kInt4, QuantizedGemmParams> {
  uint32_t low_zero, high_zero;

  __device__ explicit Int4Weight(const Params& p) {
    const bool symmetric = p.weight.mins == nullptr;
    if constexpr (std::is_same_v<T, __half>) {
      low_zero = symmetric ? 0x64086408u : 0x64006400u;   // 1024 + 8, 1024
      high_zero = symmetric ? 0xd480d480u : 0xd400d400u;  // -(64 + 8), -64
    } else {
      low_zero = high_zero = symmetric ? 0xc308c308u : 0xc300c300u;  // -(128 + 8), -128
    }
  }

  template <int kChunk>
  __device__ Fragments fragments(const unsigned char* stage, int row_tile, int block) const {
    const uint2 q = *reinterpret_cast<const uint2*>(this->template at<kChunk>(stage, row_tile, block));
    Fragments f;
    unpack(q.x, f.a[0]);
    unpack(q.y, f.a[1]);
    return f;
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

// q is an index into 16 numbers, rounded to 16 bits. They stay in eight registers, lower and upper bytes apart: a byte
// permutation looks up four of eight entries at once.
template <class T>
struct TableWeight : PackedWeight<WeightFormat::kTable, TableGemmParams> {
  uint32_t lower[4] = {}, upper[4] = {};

  __device__ explicit TableWeight(const Params& p) {
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
    uint32_t pairs[2][2];  // of nibbles 0, 1 and 2, 3; of 4, 5 and 6, 7
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
