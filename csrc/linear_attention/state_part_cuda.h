// A warp's part of a state on the GPU: all rows of a few columns, in registers. A lane has four columns of eight rows.
// So the sums over all rows are made within the warp, without a barrier, and keys and queries, which all lanes of a row
// need, are read from shared memory once for four columns: that memory's bandwidth would bind otherwise.
#pragma once

#include "common/cuda/dtype.h"
#include "common/cuda/ptx.h"
#include "common/cuda/reduce.h"
#include "common/cuda/vector_io.h"
#include "linear_attention/state_plan.h"

namespace fastinfer::cuda {

inline constexpr int kLaneColumns = 4, kLaneRows = 8;
inline constexpr int kPartWarps = kStateThreads / kWarpSize;
inline constexpr int kRowVector = 4;  // rows of a lane that are neighbours
using LaneRows = float[kLaneRows];
using LaneColumns = Vector<float, kLaneColumns>;

template <int kRows>  // as many as a state has at most
struct StatePart {
  static constexpr int kRowLanes = kRows / kLaneRows;  // neighbours, with different rows of the same columns
  static constexpr int kColumns = kWarpSize / kRowLanes * kLaneColumns, kBlockColumns = kPartWarps * kColumns;
  LaneColumns s[kLaneRows] = {};

  // The lane's first column of the block's.
  __device__ static int first_column() {
    return threadIdx.x / kWarpSize * kColumns + threadIdx.x % kWarpSize / kRowLanes * kLaneColumns;
  }

  // The column, of the lane's, whose sums it has.
  __device__ static int summed_column() {
    return threadIdx.x % kLaneColumns;
  }

  // One lane for each sum.
  __device__ static bool has_sum() {
    return threadIdx.x % kRowLanes < kLaneColumns;
  }

  // `columns` is where the lane's columns begin, in rows of `stride` vectors; a state has so many rows.
  __device__ void load(const LaneColumns* columns, int64_t stride, int rows) {
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      if (const int row = lane_row(i); row < rows) s[i] = load_once(columns + row * stride);
    }
  }

  __device__ void store(LaneColumns* columns, int64_t stride, int rows) const {
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
      if (const int row = lane_row(i); row < rows) store_once(columns + row * stride, s[i]);
    }
  }

  // The lane's rows of a vector in shared memory.
  __device__ static void load_rows(const float* vector, LaneRows& rows) {
#pragma unroll
    for (int i = 0; i < kLaneRows; i += kRowVector) {
      const auto part = load_vector<kRowVector>(vector + lane_row(i));
#pragma unroll
      for (int j = 0; j < kRowVector; ++j) rows[i + j] = part.values[j];
    }
  }

  // The lane's columns of the sum over its rows of s times the vector.
  __device__ LaneColumns dot(const LaneRows& vector) const {
    LaneColumns sums{};
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
#pragma unroll
      for (int c = 0; c < kLaneColumns; ++c) sums.values[c] = fmaf(s[i].values[c], vector[i], sums.values[c]);
    }
    return sums;
  }

  __device__ void scale(float factor) {
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
#pragma unroll
      for (int c = 0; c < kLaneColumns; ++c) s[i].values[c] *= factor;
    }
  }

  // The same with a factor for each row.
  __device__ void scale(const LaneRows& factors) {
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
#pragma unroll
      for (int c = 0; c < kLaneColumns; ++c) s[i].values[c] *= factors[i];
    }
  }

  // s += key d^T.
  __device__ void add(const LaneRows& key, const LaneColumns& d) {
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
#pragma unroll
      for (int c = 0; c < kLaneColumns; ++c) s[i].values[c] = fmaf(key[i], d.values[c], s[i].values[c]);
    }
  }

  // The sum over all rows of the lane's `summed_column`.
  __device__ static float sum(LaneColumns parts) {
    // Lanes exchange halves of their columns until each has one of them.
#pragma unroll
    for (int columns = kLaneColumns / 2; columns > 0; columns /= 2) {
      const bool upper = threadIdx.x & columns;
#pragma unroll
      for (int c = 0; c < columns; ++c) {
        const float given = upper ? parts.values[c] : parts.values[c + columns];
        const float kept = upper ? parts.values[c + columns] : parts.values[c];
        parts.values[c] = kept + __shfl_xor_sync(kFullMask, given, columns);
      }
    }
    float sum = parts.values[0];
#pragma unroll
    for (int offset = kLaneColumns; offset < kRowLanes; offset *= 2) sum += __shfl_xor_sync(kFullMask, sum, offset);
    return sum;
  }

  // The values of all the lane's columns, of which each lane has that of its `summed_column`.
  __device__ static LaneColumns columns_of(float value) {
    LaneColumns all;
#pragma unroll
    for (int c = 0; c < kLaneColumns; ++c) {
      all.values[c] = __shfl_sync(kFullMask, value, threadIdx.x % kWarpSize / kLaneColumns * kLaneColumns + c);
    }
    return all;
  }

 private:
  // Eight lanes read 128 bytes of a vector at once.
  __device__ static int lane_row(int i) {
    return (i / kRowVector * kRowLanes + threadIdx.x % kRowLanes) * kRowVector + i % kRowVector;
  }
};

}  // namespace fastinfer::cuda
