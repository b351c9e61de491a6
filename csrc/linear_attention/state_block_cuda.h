// A block of a recurrence on the GPU: its warps' parts of a state, and the tokens that it prepares for them.
#pragma once

#include "common/cuda/dtype.h"
#include "common/cuda/row.h"
#include "linear_attention/state_part_cuda.h"
#include "linear_attention/state_slots.h"

namespace fastinfer::cuda {

// What a block computes: some columns of one head's state, over the tokens of one sequence.
template <int kRows>
struct StateBlock {
  using Part = StatePart<kRows>;
  int64_t seq, head, first_column, begin, end;
  const StateSlots& slots;
  LaneColumns* states;  // the lane's columns in slot 0
  int64_t row_vectors, slot_vectors;
  int rows;
  bool has_part;  // the same in a warp

  __device__ StateBlock(const StateSlots& slots, float* state, int64_t heads, int64_t rows, int64_t columns)
      : slots(slots), rows(static_cast<int>(rows)) {
    const int64_t column_blocks = (columns + Part::kBlockColumns - 1) / Part::kBlockColumns;
    first_column = blockIdx.x % column_blocks * Part::kBlockColumns;
    head = blockIdx.x / column_blocks % heads;
    seq = blockIdx.x / column_blocks / heads;
    begin = slots.query_start[seq];
    end = slots.query_start[seq + 1];
    const int64_t column = first_column + Part::first_column();
    has_part = threadIdx.x < kStateThreads && column < columns;
    row_vectors = columns / kLaneColumns;
    slot_vectors = slots.stride / kLaneColumns;
    states = reinterpret_cast<LaneColumns*>(state) + head * rows * row_vectors + column / kLaneColumns;
  }

  __device__ bool exists(int32_t slot) const {
    return slot >= 0 && slot < slots.slots;
  }

  // The state before the first token, or zeros.
  __device__ Part load() const {
    Part part;
    const int32_t slot = slots.reads[seq];
    if (has_part && exists(slot)) part.load(states + slot * slot_vectors, row_vectors, rows);
    return part;
  }

  __device__ void store(const Part& part, int32_t slot) const {
    if (exists(slot)) part.store(states + slot * slot_vectors, row_vectors, rows);
  }

  // Calls prepare(prepared, thread, first) for the tokens from `first` on, with threads numbered from 0, and then
  // compute(prepared, tokens) where there is a part. The first four warps have the parts. With kAhead four more prepare
  // the next tokens meanwhile; without it the same ones do, and more blocks find room.
  template <class Prepared, bool kAhead, class Prepare, class Compute>
  __device__ void each_prepared(Prepare&& prepare, Compute&& compute) const {
    constexpr int kTokens = Prepared::kTokens;
    auto* const prepared = reinterpret_cast<Prepared*>(dynamic_shared());  // one; with kAhead two, in turns
    const int preparing = static_cast<int>(threadIdx.x) - (kAhead ? kStateThreads : 0);
    const auto prepare_at = [&](Prepared& tokens, int64_t first) {
      if (preparing >= 0 && first < end) prepare(tokens, preparing, first);
    };
    int turn = 0;
    prepare_at(prepared[0], begin);
    for (int64_t first = begin; first < end; first += kTokens) {
      __syncthreads();
      if constexpr (kAhead) prepare_at(prepared[turn ^ 1], first + kTokens);
      if (has_part) compute(prepared[turn], static_cast<int>(min(end - first, int64_t{kTokens})));
      if constexpr (kAhead) {
        turn ^= 1;
      } else {
        __syncthreads();  // these have been read
        prepare_at(prepared[0], first + kTokens);
      }
    }
  }
};

// Loads eight elements of a row, in vectors if it is aligned to 16 bytes.
template <class T>
__device__ void load_eight(const T* p, bool aligned, float (&values)[8]) {
  if (aligned) {
    load_floats(p, values);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = to_float(p[i]);
  }
}

template <class T>
__device__ float load_float_or(const void* p, DType dtype, int64_t i) {
  return dtype == DType::kFloat32 ? static_cast<const float*>(p)[i] : to_float(static_cast<const T*>(p)[i]);
}

}  // namespace fastinfer::cuda
