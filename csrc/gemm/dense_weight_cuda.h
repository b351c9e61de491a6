// The A fragments of the GPU's matrix products, and the dense weights that they come from.
//
// A weight format (DenseWeight here, Int4Weight, Int8Weight and LutWeight in quant/*_dequantize_cuda.h) copies its part
// of a pipeline stage to shared memory, and gives the fragments of 16 rows by 32 inputs as exact 16-bit numbers for two
// mma of 16 inputs. The scales are applied later.
//
// Within 16 inputs the order is not mma's. A lane's inputs 4t .. 4t + 3 take the places of inputs 2t, 2t + 1, 2t + 8
// and 2t + 9. The sum is the same as long as the activations come in the same order, and both sides become 8-byte
// reads.
#pragma once

#include "common/cuda/dtype.h"
#include "common/cuda/ptx.h"
#include "common/cuda/reduce.h"
#include "gemm/gemm.h"
#include "gemm/gemm_plan.h"

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

}  // namespace fastinfer::cuda
