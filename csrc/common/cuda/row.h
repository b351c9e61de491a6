// How a block goes through a row of elements: as floats, in accesses of at most 16 bytes.
#pragma once

#include "common/cuda/dtype.h"
#include "common/cuda/vector_io.h"

namespace fastinfer::cuda {

template <class T, int kCount>
__device__ void load_floats(const T* p, float (&values)[kCount]) {
  constexpr int kPiece = kCount * sizeof(T) <= 16 ? kCount : kVectorElements<T>;
#pragma unroll
  for (int i = 0; i < kCount; i += kPiece) {
    const auto piece = load_vector<kPiece>(p + i);
    for (int j = 0; j < kPiece; ++j) values[i + j] = to_float(piece.values[j]);
  }
}

template <int kCount, class C>
__device__ void store_values(C* out, const float (&values)[kCount]) {
  constexpr int kPiece = kCount * sizeof(C) <= 16 ? kCount : 16 / sizeof(C);
#pragma unroll
  for (int i = 0; i < kCount; i += kPiece) {
    Vector<C, kPiece> piece;
#pragma unroll
    for (int j = 0; j < kPiece; ++j) piece.values[j] = from_float<C>(values[i + j]);
    store_vector(out + i, piece);
  }
}

// Calls fn(slot, i) for this thread's vectors of kCount elements, element i the first. kHeld: how many of them a thread
// keeps in registers (plan_row); with 0 there is one slot, and each sweep reads them again.
template <int kCount, int kHeld, class Fn>
__device__ void each_vector(int64_t hidden, Fn&& fn) {
  if constexpr (kHeld == 0) {
    for (int64_t i = threadIdx.x * kCount; i < hidden; i += blockDim.x * kCount) fn(0, i);
  } else {
#pragma unroll
    for (int v = 0; v < kHeld; ++v) {
      const int64_t i = (v * blockDim.x + threadIdx.x) * kCount;
      if (i < hidden) fn(v, i);
    }
  }
}

}  // namespace fastinfer::cuda
