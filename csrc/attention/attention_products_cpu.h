// The two matrix products of attention on a tile of the cache. Keys and values are read through a pointer to each row,
// either where they lie in the cache, converted on the way, or from a copy in fp32. However rows and columns are
// blocked, an element's sum has one order: a logit sums lanes of head_dim, then the lanes; an output sums positions
// upwards.
#pragma once

#include <algorithm>

#include "attention/kv_tile_cpu.h"
#include "common/cpu/reduce.h"

namespace fastinfer::cpu::FASTINFER_ISA {

// Calls fn<n>(row) for blocks of n <= 4 rows. 3 rows by 4 vectors of sums and their operands fill 16 registers.
template <class Fn>
FASTINFER_INLINE void for_each_row_block(int rows, const Fn& fn) {
  int row = 0;
  for (; rows - row > 4 || rows - row == 3; row += 3) fn.template operator()<3>(row);
  switch (rows - row) {
    case 1: return fn.template operator()<1>(row);
    case 2: return fn.template operator()<2>(row);
    case 4: return fn.template operator()<4>(row);
    default: return;
  }
}

// Keys and vectors per block of 1 to 4 rows: enough sums to hide the latency of their additions.
inline constexpr int kKeysOf[] = {0, 8, 4, 4, 2};
inline constexpr int kVectorsOf[] = {0, 8, 4, 4, 2};

template <int kRows, int kKeys, class C>
FASTINFER_INLINE void multiply_key_block(const float* q, int columns, const C* const* keys, float* scores) {
  f32v sums[kRows * kKeys];
  const auto add = [&](int d, bool first) __attribute__((always_inline)) {
    f32v query[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) query[r] = load(q + r * columns + d);
#pragma GCC unroll 8
    for (int k = 0; k < kKeys; ++k) {
      const f32v key = load(keys[k] + d);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        f32v& sum = sums[r * kKeys + k];
        sum = first ? query[r] * key : sum + query[r] * key;
      }
    }
  };
  add(0, true);
  for (int d = kLanes; d < columns; d += kLanes) add(d, false);
#pragma GCC unroll 4
  for (int i = 0; i < kRows * kKeys; i += 4) {
    const f32x4 four = reduce_add(sums[i], sums[i + 1], sums[i + 2], sums[i + 3]);
    if constexpr (kKeys >= 4) {
      store_as(scores + i / kKeys * kTile + i % kKeys, four);
    } else {
      std::memcpy(scores + i / kKeys * kTile, &four, 8);
      std::memcpy(scores + (i / kKeys + 1) * kTile, reinterpret_cast<const char*>(&four) + 8, 8);
    }
  }
}

// A head's rows are too far apart for the hardware's prefetcher, and prefetching all of them at once would stall. So
// with each row, the row at the same place of the next tile is prefetched.
template <class C>
FASTINFER_INLINE void prefetch(const C* row, int count) {
  for (int d = 0; d < count; d += 64 / static_cast<int>(sizeof(C))) __builtin_prefetch(row + d);
}

// scores[rows][kTile] = q[rows][columns] keys[kTile][columns]^T, of each row what it sees and a few more.
template <bool kAhead, class C>
void multiply_keys(const float* q, int columns, const Range* seen, int rows, const C* const* keys,
                   [[maybe_unused]] const C* const* next_keys, float* scores) {
  const int chunk = std::max(8, 4096 / columns / 8 * 8);  // 16 KB of fp32 keys stay in L1 for all rows
  for (int begin = 0; begin < kTile; begin += chunk) {
    for_each_row_block(rows, [&]<int kRows>(int r) {
      constexpr int kKeys = kKeysOf[kRows];
      const int first = std::max(begin, seen[r].first / kKeys * kKeys);
      const int end = std::min(begin + chunk, seen[r + kRows - 1].end);
      for (int j = first; j < end; j += kKeys) {
        if constexpr (kAhead) {
          for (int k = 0; k < kKeys && r == 0; ++k) prefetch(next_keys[j + k], columns);
        }
        multiply_key_block<kRows, kKeys>(q + r * columns, columns, keys + j, scores + r * kTile + j);
      }
    });
  }
}

// Positions `seen`, which all rows see.
template <int kRows, int kVectors, bool kAhead, class C>
FASTINFER_INLINE void multiply_value_block(const float* weights, Range seen, const C* const* values,
                                           [[maybe_unused]] const C* const* next_values, int column, float* out,
                                           int columns, bool accumulate) {
  f32v sums[kRows * kVectors] = {};
  if (accumulate) {
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sums[r * kVectors + v] = load(out + r * columns + column + v * kLanes);
    }
  }
  for (int j = seen.first; j < seen.end; ++j) {
    const C* const row = values[j] + column;
    if constexpr (kAhead) prefetch(next_values[j] + column, kVectors * kLanes);
    float weight[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) weight[r] = weights[r * kTile + j];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const f32v value = in_register(load(row + v * kLanes));  // or GCC loads it for each row
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) sums[r * kVectors + v] += value * weight[r];
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) store(out + r * columns + column + v * kLanes, sums[r * kVectors + v]);
  }
}

template <int kRows, int kWidth, bool kAhead, class C>
[[gnu::noinline]] void multiply_value_rows(const float* weights, Range seen, const C* const* values,
                                           const C* const* next_values, int column, float* out, int columns,
                                           bool accumulate) {
  constexpr int kVectors = std::min(kWidth, kVectorsOf[kRows]);
  for (int c = column; c < column + kWidth * kLanes; c += kVectors * kLanes) {
    multiply_value_block<kRows, kVectors, kAhead>(weights, seen, values, next_values, c, out, columns, accumulate);
  }
}

// out[rows][columns] = weights[rows][kTile] values[kTile][columns], of each row the positions that it sees. A NaN that
// one row sees must not reach the others as 0 times NaN: positions that not all of a block see are added row by row.
template <bool kAhead, class C>
void multiply_values(const float* weights, const Range* seen, int rows, const C* const* values,
                     const C* const* next_values, float* out, int columns) {
  int column = 0;
  const auto run = [&]<int kWidth>() {  // the values' columns stay in L1 for all rows
    for_each_row_block(rows, [&]<int kRows>(int r) {
      const Range first = seen[r], last = seen[r + kRows - 1];
      const Range all{last.first, std::max(last.first, first.end)};
      const auto add_rows = [&](auto&& range_of, bool accumulate) {
        for (int i = r; i < r + kRows; ++i) {
          multiply_value_rows<1, kWidth, kAhead>(weights + i * kTile, range_of(seen[i]), values, next_values, column,
                                                 out + i * columns, columns, accumulate);
        }
      };
      const bool head = first.first < last.first;
      if (head) add_rows([&](Range row) { return Range{row.first, std::min(row.end, all.first)}; }, false);
      multiply_value_rows<kRows, kWidth, kAhead>(weights + r * kTile, all, values, next_values, column,
                                                 out + r * columns, columns, head);
      if (first.end < last.end) add_rows([&](Range row) { return Range{std::max(row.first, all.end), row.end}; }, true);
    });
    column += kWidth * kLanes;
  };
  while (columns - column >= 8 * kLanes) run.template operator()<8>();
  if (columns - column >= 4 * kLanes) run.template operator()<4>();
  if (columns - column >= 2 * kLanes) run.template operator()<2>();
  if (columns - column >= kLanes) run.template operator()<1>();
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
