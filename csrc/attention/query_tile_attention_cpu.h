// Attention of a tile of query rows - some tokens times the heads that share a KV head - over tiles of the cache.
#pragma once

#include <algorithm>
#include <utility>

#include "attention/attention_products_cpu.h"
#include "attention/attention_softmax_cpu.h"
#include "attention/kv_tile_cpu.h"
#include "attention/transposed_keys_cpu.h"
#include "common/cpu/parallel.h"

#if defined(FASTINFER_BF16_PROMPTS)  // the kernels that compute the rows of prompts alone (cmake/isa_flags.cmake)
#include "attention/attention_tiles_cpu.h"
#endif

namespace fastinfer::cpu::FASTINFER_ISA {

inline constexpr int kSplit = 8;  // tiles: their states are merged first, then the splits'

// Up to this many rows read the cache in place; more share a copy in fp32.
inline constexpr int kFewRows = 8;

struct QueryTile {
  int seq;
  int kv_head;
  int token_begin;  // within the sequence's queries
  int token_end;
};

// A head of a row in memory, padded.
inline int padded_columns(int columns) {
#if defined(FASTINFER_BF16_PROMPTS)
  constexpr int kStep = kTileInputs;
#else
  constexpr int kStep = kLanes;
#endif
  return (columns + kStep - 1) / kStep * kStep;
}
inline int columns_of(const PagedAttentionParams& p) {
  return padded_columns(p.head_dim);
}
inline int value_columns_of(const PagedAttentionParams& p) {
  return padded_columns(p.value_dim);
}

template <class C>
class QueryTileAttention {
 public:
  QueryTileAttention(const PagedAttentionParams& p, int max_rows)
      : p_(p),
        group_(p.q_heads / p.kv_heads),
        columns_(columns_of(p)),
        value_columns_(value_columns_of(p)),
        factor_(p.softcap > 0.0f ? p.scale * 2.0f * kLog2e / p.softcap : p.scale * kLog2e)
#if defined(FASTINFER_BF16_PROMPTS)
        ,
        tiles_(max_rows, columns_, value_columns_)
#endif
  {
    const int64_t rows = max_rows, columns = columns_, state = AttentionState::size(max_rows, value_columns_);
    float* memory = scratch_array<float>(1, rows * (columns + kTile + 3) + 3 * state + 3 * kTile * columns);
    const auto take = [&](int64_t count) { return std::exchange(memory, memory + count); };
    for (float*& at : states_) at = take(state);
    q_ = take(rows * columns);
    scores_ = take(rows * kTile);
    keys_ = take(kTile * columns);
    values_ = p.values_in_keys() ? keys_ : take(kTile * columns);
    transposed_keys_ = take(kTile * columns);
    for (int j = 0; j < kTile; ++j) wide_keys_[j] = keys_ + j * columns, wide_values_[j] = values_ + j * columns;
    position_ = reinterpret_cast<int*>(take(rows));
    seen_ = reinterpret_cast<Range*>(take(2 * rows));
#if defined(FASTINFER_BF16_PROMPTS)
    std::fill_n(q_, columns, 0.0f);  // what is beyond head_dim stays zero
    for (float* pages : {keys_, values_}) std::fill_n(pages, kTile * columns, 0.0f);
#endif
  }

  void begin(const QueryTile& rows) {
    rows_ = rows;
    count_ = (rows.token_end - rows.token_begin) * group_;
    const int queries = p_.query_start[rows.seq + 1] - p_.query_start[rows.seq];
    const int first_position = p_.seq_lens[p_.table_row(rows.seq, rows.kv_head)] - queries + rows.token_begin;
    for (int r = 0; r < count_; ++r) position_[r] = first_position + r / group_;
    kv_begin_ = p_.first_visible(first_position);
    kv_end_ = first_position + (rows.token_end - rows.token_begin);
#if !defined(FASTINFER_BF16_PROMPTS)
    direct_ = count_ <= kFewRows && p_.head_dim % kLanes == 0;
#endif
    dispatch(p_.dtype, [&]<class T>(T) { load_queries<T>(); });
  }

  int rows() const {
    return count_;
  }

  // Calls done(tile, state) after each of the cache's tiles begin..end - 1, with the state that `place(tile)` names.
  template <class Place, class Done>
  void run_tiles(int begin, int end, const Place& place, const Done& done) {
    const KvPages<C> pages(p_, rows_.seq, rows_.kv_head);
    KvTile<C> found[2];
    find(pages, begin, found[begin % 2]);
    for (int tile = begin; tile < end; ++tile) {
      if (tile + 1 < end) find(pages, tile + 1, found[(tile + 1) % 2]);
      const AttentionState state = place(tile);
      run_tile(pages, tile, found[tile % 2], found[tile + 1 < end ? (tile + 1) % 2 : tile % 2], state);
      done(tile, state);
    }
  }

  AttentionState scratch_state(int index) const {
    return AttentionState::at(states_[index], count_);
  }

  void store_output(const AttentionState& state) {
    dispatch(p_.dtype, [&]<class T>(T) { store_output<T>(state); });
  }

 private:
  // Row r is head r % group of token r / group.
  int64_t query_token(int r) const {
    return p_.query_start[rows_.seq] + rows_.token_begin + r / group_;
  }
  int query_head(int r) const {
    return rows_.kv_head * group_ + r % group_;
  }

  template <class T>
  void load_queries() {
    for (int r = 0; r < count_; ++r) {
      const int64_t offset = query_token(r) * p_.q_stride + static_cast<int64_t>(query_head(r)) * p_.head_dim;
      const T* row = static_cast<const T*>(p_.q) + offset;
#if defined(FASTINFER_BF16_PROMPTS)  // the factor comes after the product: bf16 queries stay exact
      for_each_vector(p_.head_dim, [&](int64_t i, int64_t lanes) { store(q_ + i, load_lanes(row + i, lanes)); });
      tiles_.set_query(r, q_);
#else
      for_each_vector(p_.head_dim, [&](int64_t i, int64_t lanes) {
        store(q_ + r * columns_ + i, load_lanes(row + i, lanes) * factor_);
      });
#endif
    }
  }

  Range seen_of_tile(int tile) const {
    return {std::max(tile * kTile, kv_begin_), std::min((tile + 1) * kTile, kv_end_)};
  }

  Range seen_in_tile(int tile) const {
    const Range seen = seen_of_tile(tile);
    return {seen.first - tile * kTile, seen.end - tile * kTile};
  }

  void find(const KvPages<C>& pages, int tile, KvTile<C>& found) const {
    const Range seen = seen_of_tile(tile);
    pages.find(tile * kTile, seen.first, seen.end, found);
  }

  void run_tile(const KvPages<C>& pages, int tile, const KvTile<C>& found, const KvTile<C>& next,
                const AttentionState& state) {
    for (int r = 0; r < count_; ++r) {
      const int first = p_.first_visible(position_[r]) - tile * kTile, end = position_[r] + 1 - tile * kTile;
      seen_[r] = {std::clamp(first, 0, kTile), std::clamp(end, 0, kTile)};
    }
#if defined(FASTINFER_BF16_PROMPTS)
    const Range seen = seen_in_tile(tile);
    pages.widen(found, next, seen.first, seen.end, columns_, keys_, values_);
    std::fill_n(values_, seen.first * columns_, 0.0f);
    std::fill(values_ + seen.end * columns_, values_ + kTile * columns_, 0.0f);
    tiles_.run(keys_, values_, factor_, seen_, count_, logits_of(found), state);
#else
    if constexpr (!kGroupScales<C>) {
      if (direct_) return multiply<true>(found, found.keys, next.keys, found.values, next.values, state);
    }
    const Range seen = seen_in_tile(tile);
    pages.widen(found, next, seen.first, seen.end, columns_, keys_, values_);
    multiply<false>(found, wide_keys_, wide_keys_, wide_values_, wide_values_, state);
#endif
  }

  Logits logits_of(const KvTile<C>& found) const {
    Logits logits{nullptr, nullptr, p_.softcap * kLog2e};
    if constexpr (kRowScales<C>) logits.key_scales = found.key_scales, logits.value_scales = found.value_scales;
    return logits;
  }

#if !defined(FASTINFER_BF16_PROMPTS)
  template <bool kAhead, class K>
  void multiply(const KvTile<C>& found, const K* const* keys, const K* const* next_keys, const K* const* values,
                const K* const* next_values, const AttentionState& state) {
    const Logits logits = logits_of(found);
    multiply_keys_of_tile<kAhead>(keys, next_keys);
    const bool plain = logits.key_scales == nullptr && logits.value_scales == nullptr && logits.cap == 0.0f;
    for (int r = 0; r < count_;) {
      if (plain && r + 4 <= count_ && std::all_of(seen_ + r, seen_ + r + 4, sees_all)) {
        softmax_four_rows(scores_ + r * kTile, state.maximum + r, state.sum + r);
        r += 4;
      } else {
        const OnlineSoftmax<float> softmax = softmax_row(scores_ + r * kTile, seen_[r], logits);
        state.maximum[r] = softmax.maximum, state.sum[r] = softmax.sum;
        ++r;
      }
    }
    multiply_values<kAhead>(scores_, seen_, count_, values, next_values, state.o, value_columns_);
  }

  template <bool kAhead, class K>
  void multiply_keys_of_tile(const K* const* keys, const K* const* next_keys) {
#if defined(FASTINFER_AVX512_VNNI)
    if constexpr (!kAhead) {
      if (count_ >= kTransposeFrom) {
        transpose_keys(keys_, columns_, transposed_keys_);
        return multiply_transposed_keys(q_, columns_, seen_, count_, transposed_keys_, scores_);
      }
    }
#endif
    multiply_keys<kAhead>(q_, columns_, seen_, count_, keys, next_keys, scores_);
  }

  static bool sees_all(const Range& seen) {
    return seen.first == 0 && seen.end == kTile;
  }
#endif

  template <class T>
  void store_output(const AttentionState& state) {
    for (int r = 0; r < count_; ++r) {
      OnlineSoftmax<float> softmax{state.maximum[r], state.sum[r]};
      float factor = 1.0f;
      if (p_.sinks != nullptr) {
        const float sink = p_.sinks[query_head(r)] * kLog2e;
        factor = softmax.raise_maximum(std::max(softmax.maximum, sink), Exp2{});
        softmax.add({sink, 1.0f}, Exp2{});
      }
      // The sum is 0 where no position is visible. NaN must show.
      const float inverse = softmax.sum == 0.0f ? 0.0f : factor / softmax.sum;
      const int64_t row = query_token(r) * p_.q_heads + query_head(r);
      T* out = static_cast<T*>(p_.out) + row * p_.value_dim;
      const float* o = state.o + static_cast<int64_t>(r) * value_columns_;
      for_each_vector(p_.value_dim,
                      [&](int64_t i, int64_t lanes) { store_lanes(out + i, load(o + i) * inverse, lanes); });
      if (p_.lse != nullptr) {
        p_.lse[row] = softmax.sum == 0.0f ? kNegInf : softmax.maximum * kLn2 + std::log(softmax.sum);
      }
    }
  }

  const PagedAttentionParams& p_;
  const int group_, columns_, value_columns_;
  const float factor_;
#if defined(FASTINFER_BF16_PROMPTS)
  AttentionTiles tiles_;
#endif
  QueryTile rows_{};
  int count_ = 0, kv_begin_ = 0, kv_end_ = 0;
  bool direct_ = false;
  float* states_[3];  // one each for a tile, a split and all
  float *q_, *scores_, *keys_, *values_, *transposed_keys_;
  const float *wide_keys_[kTile], *wide_values_[kTile];
  int* position_;  // [rows]
  Range* seen_;    // [rows], of the tile in work
};

}  // namespace fastinfer::cpu::FASTINFER_ISA
