// Softmax of a tile's scores, and the states that tiles leave and that are merged. Logits are in units of ln 2, so that
// the exponential is one of base 2.
#pragma once

#include <cmath>
#include <cstring>

#include "attention/kv_tile_cpu.h"
#include "common/cpu/reduce.h"
#include "common/online_softmax.h"

namespace fastinfer::cpu::FASTINFER_ISA {

// 2^x for x <= 127 to within 2 ulp: 2^n, n the nearest integer, times a minimax polynomial (9e-8). 2^-126 below, which
// adds nothing to a sum that has 1 in it; NaN of NaN.
FASTINFER_INLINE f32v exp2(f32v x) {
  const f32v bounded = max(broadcast(-126.0f), x);  // in this order a NaN stays
  const float kRound = 12582912.0f + 127.0f;        // 1.5 * 2^23: the low mantissa bits become n + 127
  const f32v shifted = bounded + kRound;
  const f32v r = bounded - (shifted - kRound);
  f32v poly = broadcast(0.001326472731f);
  poly = poly * r + 0.009671512991f;
  poly = poly * r + 0.05550733581f;
  poly = poly * r + 0.2402224243f;
  poly = poly * r + 0.6931470037f;
  poly = poly * r + 1.0f;
  return poly * (f32v)((i32v)shifted << 23);
}

// The exponential of attention's OnlineSoftmax.
struct Exp2 {
  FASTINFER_INLINE f32v operator()(f32v x) const {
    return exp2(x);
  }
  FASTINFER_INLINE float operator()(float x) const {
    return std::exp2(x);
  }
};

// Partial attention of some rows over some positions: an OnlineSoftmax per row, and O relative to its maximum.
struct AttentionState {
  float* maximum;  // [rows]
  float* sum;      // [rows]
  float* o;        // [rows, columns]

  static int64_t size(int rows, int columns) {
    return 2 * padded(rows) + static_cast<int64_t>(rows) * columns;
  }
  static AttentionState at(float* memory, int rows) {
    return {memory, memory + padded(rows), memory + 2 * padded(rows)};
  }

 private:
  static int64_t padded(int rows) {
    return (rows + kLanes - 1) / kLanes * kLanes;
  }
};

// Adds `from` to `into`. Not inlined: rounding must not depend on the place it is called from.
[[gnu::noinline]] inline void merge(const AttentionState& into, const AttentionState& from, int rows, int columns) {
  for (int begin = 0; begin < rows; begin += kLanes) {
    OnlineSoftmax<f32v> softmax{load(into.maximum + begin), load(into.sum + begin)};
    const OnlineSoftmax<f32v> part{load(from.maximum + begin), load(from.sum + begin)};
    float keeps[kLanes], adds[kLanes];
    store(keeps, softmax.raise_maximum(max(softmax.maximum, part.maximum), Exp2{}));
    store(adds, softmax.add(part, Exp2{}));
    store(into.maximum + begin, softmax.maximum);
    store(into.sum + begin, softmax.sum);
    for (int r = begin; r < std::min(begin + kLanes, rows); ++r) {
      float* const o = into.o + static_cast<int64_t>(r) * columns;
      const float* const other = from.o + static_cast<int64_t>(r) * columns;
      const f32v kept = broadcast(keeps[r - begin]), added = broadcast(adds[r - begin]);
      for (int i = 0; i < columns; i += kLanes) store(o + i, load(o + i) * kept + load(other + i) * added);
    }
  }
}

// How products become logits: times the key's scale; then cap * tanh(x / 2) where there is a cap, for which the queries
// bring 2 / cap as a factor.
struct Logits {
  const float* key_scales;    // [kTile] or null
  const float* value_scales;  // [kTile] or null: factors of the probabilities, but not of their sum
  float cap;                  // 0: none; times log2(e), as are the products without a cap and with it
};

// cap * tanh(x / 2), and tanh(x) = 1 - 2 / (exp(2 x) + 1).
FASTINFER_INLINE f32v cap_logits(f32v s, float cap) {
  return cap * (1.0f - 2.0f / (exp2(select(s > 100.0f, broadcast(100.0f), s)) + 1.0f));
}

// Scores of a row become probabilities relative to their maximum. Outside `seen` nothing counts, and what is written
// there means nothing.
[[gnu::noinline]] inline OnlineSoftmax<float> softmax_row(float* scores, Range seen, const Logits& logits) {
  if (seen.first >= seen.end) return {};  // decided by position, because the maximum can lose a NaN
  const int first = seen.first / kLanes * kLanes;
  f32v largest = broadcast(kNegInf);
  if (seen.first == 0 && seen.end == kTile && logits.key_scales == nullptr && logits.cap == 0.0f) {
    for (int j = 0; j < kTile; j += kLanes) largest = max(load(scores + j), largest);
  } else {
    i32v lane;
    for (int i = 0; i < kLanes; ++i) lane[i] = i;
    for (int j = first; j < seen.end; j += kLanes) {
      f32v s = load(scores + j);
      if (logits.key_scales != nullptr) s *= load(logits.key_scales + j);
      if (logits.cap > 0.0f) s = cap_logits(s, logits.cap);
      s = select((lane + j >= seen.first) & (lane + j < seen.end), s, broadcast(kNegInf));
      store(scores + j, s);
      largest = max(s, largest);
    }
  }
  const float maximum = max_of_lanes(largest);
  f32v sums{};
  for (int j = first; j < seen.end; j += kLanes) {
    const f32v probability = exp2(load(scores + j) - maximum);
    sums += probability;
    store(scores + j, logits.value_scales == nullptr ? probability : probability * load(logits.value_scales + j));
  }
  return {maximum, reduce_add(sums, sums, sums, sums)[0]};
}

// softmax_row, bit by bit, of four rows that see the whole tile, where products are logits: their sums are finished
// together, and the rows' exponentials do not wait for each other.
[[gnu::noinline]] inline void softmax_four_rows(float* scores, float* maximum, float* sum) {
  f32v sums[4] = {};
#pragma GCC unroll 4
  for (int r = 0; r < 4; ++r) {
    f32v largest = broadcast(kNegInf);
    for (int j = 0; j < kTile; j += kLanes) largest = max(load(scores + r * kTile + j), largest);
    maximum[r] = max_of_lanes(largest);
  }
#pragma GCC unroll 4
  for (int r = 0; r < 4; ++r) {
    for (int j = 0; j < kTile; j += kLanes) {
      const f32v probability = exp2(load(scores + r * kTile + j) - maximum[r]);
      sums[r] += probability;
      store(scores + r * kTile + j, probability);
    }
  }
  store_as(sum, reduce_add(sums[0], sums[1], sums[2], sums[3]));
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
