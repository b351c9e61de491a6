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
#include "common/cuda/vector_io.h"
#include "gemm/gemm.h"
#include "gemm/gemm_plan.h"

namespace fastinfer::cuda {

inline constexpr int kGemmRowTiles = kGemmRows / kTileRows;

struct Fragments {
  uint32_t a[2][4];  // inputs 0 .. 15, then 16 .. 31
};

// Two 16-bit floats in a register.
template <class T>
__device__ uint32_t pack2(float lower, float upper) {
  const Vector<T, 2> pair{{from_float<T>(lower), from_float<T>(upper)}};
  uint32_t word;
  memcpy(&word, &pair, sizeof word);
  return word;
}

// [n, k], row by row.
template <class T>
struct DenseWeight {
  using Params = DenseGemmParams;
  static constexpr WeightFormat kFormat = WeightFormat::kDense;

  __device__ explicit DenseWeight(const Params& /*p*/) {}

  // A thread's copies of a unit's chunks, one after another; zeros past the weight's last input.
  template <int kChunk, int kThreads, bool /*kClamped*/>
  class Copy {
    static constexpr int kPieces = kChunk / 8, kRowBytes = shared_row_bytes(kChunk), kRows = kThreads / kPieces;
    static_assert(kRows % 4 == 0);

   public:
    __device__ void start(const Params& p, int expert, int row_unit, int chunk) {
      const int row = static_cast<int>(threadIdx.x) / kPieces, first = row_unit * kGemmRows + row;
      const int input = chunk * kChunk + static_cast<int>(threadIdx.x) % kPieces * 8;
      from = static_cast<const T*>(p.weight) + (int64_t{expert} * p.n + first) * p.k + input;
      step = kRows * p.k;
      rows = static_cast<int>(p.n) - first;
      inputs = static_cast<int>(p.k) - input;
      place = row * kRowBytes + static_cast<int>(threadIdx.x) % kPieces * 16;
    }

    __device__ void advance() {
      from += kChunk;
      inputs -= kChunk;
    }

    __device__ void copy(unsigned char* stage) const {
      const T* at = from;
#pragma unroll
      for (int i = 0; i < kGemmRows; i += kRows, at += step) {
        if (i < rows) cp_async(stage + place + i * kRowBytes, inputs > 0 ? at : from + inputs - 8, inputs > 0);
      }
    }

   private:
    const T* from;
    int64_t step;
    int rows, inputs, place;
  };

  // The place of a block in a stage.
  template <int kChunk>
  __device__ static constexpr int place(int row_tile, int block) {
    return row_tile * kTileRows * shared_row_bytes(kChunk) + block * kBlockInputs * 2;
  }

  // The place of this lane's bytes in a block.
  template <int kChunk>
  __device__ static int lane_place() {
    const int lane = threadIdx.x % kWarpSize;
    return lane / 4 * shared_row_bytes(kChunk) + lane % 4 * 8;
  }

  // `lane_bytes`: the stage from this lane's place on.
  template <int kChunk>
  __device__ Fragments fragments(const unsigned char* lane_bytes, int row_tile, int block) const {
    constexpr int kRowBytes = shared_row_bytes(kChunk);
    const unsigned char* row = lane_bytes + place<kChunk>(row_tile, block);
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
