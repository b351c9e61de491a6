// A warp's part of a state on the GPU, 32 rows of 32 columns in registers. A thread has four columns of eight rows. The
// eight lanes that are neighbours have the same rows, so that they move whole lines of memory, and read their keys and
// queries at once.
#pragma once

#include "common/cuda/dtype.h"
#include "common/cuda/ptx.h"
#include "common/cuda/reduce.h"
#include "common/cuda/vector_io.h"

namespace fastinfer::cuda {

inline constexpr int kPartColumns = 32, kPartRows = 32;
inline constexpr int kLaneColumns = 4, kLaneRows = 8, kLanesOfRow = kPartColumns / kLaneColumns;
static_assert(kWarpSize / kLanesOfRow * kLaneRows == kPartRows);
using Four = Vector<float, kLaneColumns>;

struct StatePart {
  Four s[kLaneRows] = {};

  // The sums over all rows of the warp of s times the vector, in all lanes.
  __device__ Four dot(const float (&vector)[kLaneRows]) const {
    Four sums{};
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
#pragma unroll
      for (int c = 0; c < kLaneColumns; ++c) sums.values[c] = fmaf(s[r].values[c], vector[r], sums.values[c]);
    }
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) {
      for (int offset = kLanesOfRow; offset < kWarpSize; offset *= 2) {
        sums.values[c] += __shfl_xor_sync(kFullMask, sums.values[c], offset);
      }
    }
    return sums;
  }

  __device__ void update(float decay, const float (&key)[kLaneRows], const Four& d) {
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
#pragma unroll
      for (int c = 0; c < kLaneColumns; ++c) s[r].values[c] = fmaf(key[r], d.values[c], s[r].values[c] * decay);
    }
  }
};

template <class T>
__device__ float load_float_or(const void* p, DType dtype, int64_t i) {
  return dtype == DType::kFloat32 ? static_cast<const float*>(p)[i] : to_float(static_cast<const T*>(p)[i]);
}

}  // namespace fastinfer::cuda
