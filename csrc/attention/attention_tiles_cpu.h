// The two matrix products of attention on a tile of the cache in bf16 tiles, or in the same blocks by vdpbf16ps where
// the CPU has no tiles, for the queries of prompts: queries, keys, probabilities and values are rounded to bf16 and
// summed in fp32, and the softmax between the products is fp32. A row's result does not depend on the other rows: its
// logits and outputs are sums over head_dim and over positions in one order, and positions that it does not see add
// zeros.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "attention/attention_softmax_cpu.h"
#include "attention/kv_tile_cpu.h"
#include "attention/transposed_keys_cpu.h"
#include "common/cpu/parallel.h"
#if defined(FASTINFER_TILES)
#include "common/cpu/tile_products.h"
#else
#include "common/cpu/vector_tiles.h"
#endif

namespace fastinfer::cpu::FASTINFER_ISA {

// softmax_row of products times `factor`, in registers. The probabilities go to a row of two tiles; where the row does
// not see a position they are 0.
[[gnu::noinline]] inline OnlineSoftmax<float> softmax_to_tiles(const float* products, float factor, Range seen,
                                                               const Logits& logits, uint8_t* out) {
  constexpr int kVectors = kTile / kLanes, kOfTile = kTileInputs / kLanes;
  f32v s[kVectors];
  i32v visible[kVectors];
  if (seen.first >= seen.end) {
    const f32v zeros[kOfTile] = {};
    for (int half = 0; half < kTile / kTileInputs; ++half) store_tile_row(out + half * kTileBytes, zeros);
    return {};
  }
  const bool all = seen.first == 0 && seen.end == kTile;
  i32v lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  f32v largest = broadcast(kNegInf);
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) {
    s[v] = load(products + v * kLanes) * factor;
    if (logits.key_scales != nullptr) s[v] *= load(logits.key_scales + v * kLanes);
    if (logits.cap > 0.0f) s[v] = cap_logits(s[v], logits.cap);
    if (!all) {
      const i32v position = lane + v * kLanes;
      visible[v] = (position >= seen.first) & (position < seen.end);
      s[v] = select(visible[v], s[v], broadcast(kNegInf));
    }
    largest = max(s[v], largest);
  }
  const float maximum = max_of_lanes(largest);
  f32v sums{};
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) {
    s[v] = exp2(s[v] - maximum);
    if (!all) s[v] = select(visible[v], s[v], f32v{});
    sums += s[v];
    if (logits.value_scales != nullptr) {
      s[v] *= load(logits.value_scales + v * kLanes);
      if (!all) s[v] = select(visible[v], s[v], f32v{});  // what is not seen may have no scale
    }
  }
#pragma GCC unroll 2
  for (int half = 0; half < kTile / kTileInputs; ++half) {
    f32v part[kOfTile];
#pragma GCC unroll 4
    for (int v = 0; v < kOfTile; ++v) part[v] = s[half * kOfTile + v];
    store_tile_row(out + half * kTileBytes, part);
  }
  return {maximum, reduce_add(sums, sums, sums, sums)[0]};
}

class AttentionTiles {
 public:
  // Multiples of kTileInputs: `columns` from row to row of keys and values, `value_columns` of a value.
  AttentionTiles(int max_rows, int columns, int value_columns)
      : columns_(columns), value_columns_(value_columns), steps_(columns / kTileInputs) {
    const int64_t groups = (max_rows + kGroupRows - 1) / kGroupRows, row_bytes = int64_t{columns} * 2;
    uint8_t* memory =
        scratch_array<uint8_t>(4, groups * kGroupRows * row_bytes + 2 * kTile * row_bytes + 2 * kGroupRows * row_bytes);
    const auto take = [&](int64_t bytes) { return std::exchange(memory, memory + bytes); };
    queries_ = take(groups * kGroupRows * row_bytes);
    keys_ = take(kTile * row_bytes);
    values_ = take(kTile * row_bytes);
    last_ = reinterpret_cast<float*>(take(2 * kGroupRows * row_bytes));
  }

  // Row r of the queries, fp32, padded with zeros; then without a row.
  void set_query(int r, const float* row) {
    for (int step = 0; step < steps_; ++step) {
      store_tile_row(queries_ + (r / kTileSide * steps_ + step) * kTileBytes + r % kTileSide * kTileRowBytes,
                     row + step * kTileInputs);
    }
  }

  // Sets the state of `rows` queries from the keys and values, fp32 [kTile, columns], of the positions that each of
  // them sees. Values of positions that no row sees must be zero; their keys and scales may be anything.
  void run(const float* keys, const float* values, float factor, const Range* seen, int rows, const Logits& logits,
           const AttentionState& state) {
    const Range all{seen[rows - 1].first, std::max(seen[rows - 1].first, seen[0].end)};  // what every row sees
    pack_keys(keys);
    pack_values(values, all);
    for (int row = 0; row < rows; row += kGroupRows) run_group(values, factor, seen, row, rows, logits, state);
  }

 private:
  static constexpr int kGroupRows = 2 * kTileSide;
  static constexpr int kHalves = kTile / kTileInputs;

  // [4 runs of 16 positions][steps][16 pairs of columns][16 positions] pairs.
  void pack_keys(const float* keys) {
    alignas(64) uint8_t rows[kTileBytes];
    for (int run = 0; run < kTile / kTileSide; ++run) {
      for (int step = 0; step < steps_; ++step) {
        const float* from = keys + run * kTileSide * columns_ + step * kTileInputs;
        for (int j = 0; j < kTileSide; ++j) store_tile_row(rows + j * kTileRowBytes, from + j * columns_);
        transpose_words(rows, keys_ + (run * steps_ + step) * kTileBytes);
      }
    }
  }

  // [columns / 16][2 runs of 32 positions][16 pairs of positions][16 columns] pairs. An infinity or a NaN that not all
  // rows see is left to add_infinite(), because 0 times it is NaN.
  void pack_values(const float* values, Range all) {
    infinite_ = 0;
    for (int j = 0; j < kTile; j += 2) {
      const bool seen_by_all = j >= all.first && j + 2 <= all.end;
      uint8_t* out = values_ + j / kTileInputs * kTileBytes + j % kTileInputs / 2 * kTileRowBytes;
      for (int column = 0; column < value_columns_; column += kLanes) {
        f32v pair[2];
        for (int i = 0; i < 2; ++i) {
          pair[i] = load(values + (j + i) * columns_ + column);
          if (seen_by_all || (j + i >= all.first && j + i < all.end)) continue;
          const i32v infinite = is_infinite(pair[i]);
          if (reduce_max(-infinite) != 0) infinite_ |= uint64_t{1} << (j + i);
          pair[i] = select(infinite, f32v{}, pair[i]);
        }
        store_as(out + column / kTileSide * kHalves * kTileBytes + column % kTileSide * 4,
                 bfloat16_pairs(pair[0], pair[1]));
      }
    }
  }

  // Also what rounding to bf16 makes infinite.
  FASTINFER_INLINE static i32v is_infinite(f32v v) {
    return (i32v)(((i32v)v & 0x7fffffff) >= 0x7f7f8000);
  }

  // The rows from `first` on, 32 or what is left of them.
  void run_group(const float* values, float factor, const Range* seen, int first, int rows, const Logits& logits,
                 const AttentionState& state) {
    alignas(64) float products[kGroupRows * kTile];
    alignas(64) uint8_t probabilities[2 * kHalves * kTileBytes];
    const int count = std::min(kGroupRows, rows - first);
    const int begin = seen[first].first, end = seen[first + count - 1].end;  // what any of them sees
    for (int j = begin / kGroupRows * kGroupRows; j < end; j += kGroupRows) {
      multiply(count, {queries_ + first / kTileSide * steps_ * kTileBytes, steps_ * kTileBytes},
               {keys_ + j / kTileSide * steps_ * kTileBytes, steps_ * kTileBytes}, steps_, products + j, kTile);
    }
    for (int r = 0; r < count; ++r) {
      uint8_t* out = probabilities + r / kTileSide * kHalves * kTileBytes + r % kTileSide * kTileRowBytes;
      const auto softmax = softmax_to_tiles(products + r * kTile, factor, seen[first + r], logits, out);
      state.maximum[first + r] = softmax.maximum, state.sum[first + r] = softmax.sum;
    }
    float* const o = state.o + static_cast<int64_t>(first) * value_columns_;
    float* const sums = count % kTileSide == 0 ? o : last_;  // whole tiles
    for (int column = 0; column < value_columns_; column += 2 * kTileSide) {
      multiply(count, {probabilities, kHalves * kTileBytes},
               {values_ + column / kTileSide * kHalves * kTileBytes, kHalves * kTileBytes}, kHalves, sums + column,
               value_columns_);
    }
    if (sums == last_) std::copy_n(last_, int64_t{count} * value_columns_, o);
    if (infinite_ != 0) add_infinite(values, probabilities, seen + first, count, o);
  }

  // sums[rows][32], whole tiles of rows.
  void multiply(int rows, TileRows a, TileRows b, int64_t steps, float* sums, int64_t stride) {
#if defined(FASTINFER_TILES)
    const auto run = rows > kTileSide ? multiply_tiles<2, float> : multiply_tiles<1, float>;
    run(tiles_, a, b, steps, true, sums, stride);
#else
    const auto run = rows > kTileSide ? multiply_tiles_in_vectors<2> : multiply_tiles_in_vectors<1>;
    run(a, b, steps, sums, stride);
#endif
  }

  void add_infinite(const float* values, const uint8_t* probabilities, const Range* seen, int rows, float* o) const {
    for (int r = 0; r < rows; ++r) {
      for (int j = seen[r].first; j < seen[r].end; ++j) {
        if ((infinite_ >> j & 1) == 0) continue;
        BFloat16 probability;
        std::memcpy(&probability,
                    probabilities + (r / kTileSide * kHalves + j / kTileInputs) * kTileBytes +
                        r % kTileSide * kTileRowBytes + j % kTileInputs * 2,
                    2);
        for (int column = 0; column < value_columns_; ++column) {
          const float value = values[j * columns_ + column];
          const float rounded = to_float(from_float<BFloat16>(value));
          if (!std::isfinite(rounded)) o[r * value_columns_ + column] += to_float(probability) * rounded;
        }
      }
    }
  }

  const int columns_, value_columns_;
  const int64_t steps_;
  uint64_t infinite_ = 0;  // positions
#if defined(FASTINFER_TILES)
  Tiles tiles_;
#endif
  uint8_t *queries_, *keys_, *values_;
  float* last_;  // outputs of a last group that is no whole tiles
};

}  // namespace fastinfer::cpu::FASTINFER_ISA
