// Flash attention over pages. A work item is a tile of query rows (some tokens times the heads that share a KV head)
// against the sequence's keys; a long single-token query is cut into splits of 512 positions so that all threads help.
//
//   for each split of 512 positions:            state = empty
//     for each tile of 64 positions:            gather K (transposed) and V to fp32
//       S = Q K^T, softcap, mask                [rows, 64]
//       P, state = online softmax               state: maximum, sum, O
//       O += P V                                [rows, head_dim]
//     merge the split's state into the row's
//
// Tiles and splits lie at absolute positions and every row goes through the same steps in the same order, so a token's
// result does not depend on how the prompt was cut, on the batch, or on the number of threads.
#include "attention/paged_attention.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <stdexcept>
#include <string>
#include <utility>

#include "attention/few_rows_cpu.h"
#include "common/cpu/parallel.h"
#include "common/cpu/vec.h"

namespace fastinfer::cpu::FASTINFER_ISA {
namespace {

constexpr int kTile = 64;        // positions: K, V and S of one tile take 16 + 16 + 8 KB at head_dim 64
constexpr int kSplit = 512;      // positions
constexpr int kTargetRows = 32;  // query rows of a tile, to reuse each gathered K and V
constexpr float kNegInf = -INFINITY;

struct Item {
  int seq;
  int kv_head;
  int token_begin;  // within the sequence's queries
  int token_end;
  int split_begin;
  int split_end;
  int64_t partial;  // index of the state that receives a split's result; -1 where the item covers all splits
};

// C[rows][columns] = (accumulate ? C : 0) + A[rows][inner] B[inner][columns]; columns % kLanes == 0.
template <int kRows, int kVectors>
FASTINFER_INLINE void multiply_block(const float* a, int lda, const float* b, int ldb, int inner, float* c, int ldc,
                                     bool accumulate) {
  f32v acc[kRows][kVectors] = {};
  if (accumulate) {
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kVectors; ++v) acc[r][v] = load(c + r * ldc + v * kLanes);
    }
  }
  for (int i = 0; i < inner; ++i) {
    for (int v = 0; v < kVectors; ++v) {
      const f32v operand = load(b + i * ldb + v * kLanes);
      for (int r = 0; r < kRows; ++r) acc[r][v] += operand * a[r * lda + i];
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) store(c + r * ldc + v * kLanes, acc[r][v]);
  }
}

template <int kRows>
void multiply_rows(const float* a, int lda, const float* b, int ldb, int inner, float* c, int ldc, int columns,
                   bool accumulate) {
  int column = 0;
  for (; column + 2 * kLanes <= columns; column += 2 * kLanes) {
    multiply_block<kRows, 2>(a, lda, b + column, ldb, inner, c + column, ldc, accumulate);
  }
  if (column < columns) multiply_block<kRows, 1>(a, lda, b + column, ldb, inner, c + column, ldc, accumulate);
}

void multiply(const float* a, int lda, int rows, const float* b, int ldb, int inner, float* c, int ldc, int columns,
              bool accumulate) {
  for (int row = 0; row < rows; row += 4) {
    const auto run = [&]<int kRows>() {
      multiply_rows<kRows>(a + row * lda, lda, b, ldb, inner, c + row * ldc, ldc, columns, accumulate);
    };
    switch (rows - row) {
      case 1: run.template operator()<1>(); break;
      case 2: run.template operator()<2>(); break;
      case 3: run.template operator()<3>(); break;
      default: run.template operator()<4>();
    }
  }
}

// Transposes a square of kLanes vectors. In registers, stage s swaps the off-diagonal lanes of neighbours at distance
// s.
FASTINFER_INLINE void transpose(f32v (&v)[kLanes]) {
#if defined(FASTINFER_VECTOR_SHUFFLES)
  i32v lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  for (int s = 1; s < kLanes; s *= 2) {
    const i32v upper = (lane & s) != 0;
    const i32v low_pick = upper ? lane - s + kLanes : lane;
    const i32v high_pick = upper ? lane + kLanes : lane + s;
    for (int i = 0; i < kLanes; ++i) {
      if (i & s) continue;
      const f32v low = __builtin_shuffle(v[i], v[i + s], low_pick);
      v[i + s] = __builtin_shuffle(v[i], v[i + s], high_pick);
      v[i] = low;
    }
  }
#else
  float square[kLanes][kLanes];  // without wide shuffles, memory is the shorter way
  for (int i = 0; i < kLanes; ++i) {
    for (int j = 0; j < kLanes; ++j) square[j][i] = v[i][j];
  }
  for (int i = 0; i < kLanes; ++i) v[i] = load(square[i]);
#endif
}

FASTINFER_INLINE f32v tanh(f32v x) {
  return 1.0f - 2.0f / (exp(2.0f * x) + 1.0f);
}

// Running softmax of a row: O is relative to exp(maximum).
struct RowState {
  float maximum;
  float sum;
};

void merge_row(RowState& state, float* o, const RowState& other, const float* other_o, int columns) {
  if (other.sum == 0.0f) return;
  const float maximum = std::max(other.maximum, state.maximum);  // in this order a NaN on the left stays
  const float keep = std::exp(state.maximum - maximum), add = std::exp(other.maximum - maximum);
  state = {maximum, state.sum * keep + other.sum * add};
  for (int i = 0; i < columns; i += kLanes) store(o + i, load(o + i) * keep + load(other_o + i) * add);
}

template <class C>
class Worker {
 public:
  Worker(const PagedAttentionParams& p, int max_rows) : p_(p) {
    group_ = p.q_heads / p.kv_heads;
    columns_ = (p.head_dim + kLanes - 1) / kLanes * kLanes;
    float* memory = scratch_array<float>(1, static_cast<size_t>(max_rows) * (3 * columns_ + kTile + 4) +
                                                2 * static_cast<size_t>(columns_) * kTile + columns_);
    const auto take = [&](int64_t count) { return std::exchange(memory, memory + count); };
    q_ = take(static_cast<int64_t>(max_rows) * columns_);
    part_o_ = take(static_cast<int64_t>(max_rows) * columns_);
    o_ = take(static_cast<int64_t>(max_rows) * columns_);
    scores_ = take(static_cast<int64_t>(max_rows) * kTile);
    keys_ = take(static_cast<int64_t>(columns_) * kTile);
    values_ = take(static_cast<int64_t>(columns_) * kTile);
    zeros_ = reinterpret_cast<const C*>(std::fill_n(memory, columns_, 0.0f) - columns_);
    take(columns_);
    part_state_ = reinterpret_cast<RowState*>(take(2 * max_rows));
    state_ = reinterpret_cast<RowState*>(take(2 * max_rows));
  }

  void run(const Item& item, float* partials) {
    begin(item);
    for (int split = item.split_begin; split < item.split_end; ++split) {
      run_split(split);
      for (int r = 0; r < rows_; ++r) merge_row(state_[r], o_row(r), part_state_[r], part_o_ + r * columns_, columns_);
    }
    if (item.partial >= 0) {
      float* partial = partials + item.partial * partial_size(group_, columns_);
      std::copy_n(o_, rows_ * columns_, partial);
      std::copy_n(reinterpret_cast<const float*>(state_), 2 * rows_, partial + rows_ * columns_);
    } else {
      finish();
    }
  }

  // Merges the splits of a single-token query, in order.
  void run_merge(const Item& item, const float* partials) {
    begin(item);
    for (int split = item.split_begin; split < item.split_end; ++split) {
      const float* partial = partials + (item.partial + split) * partial_size(group_, columns_);
      const auto* states = reinterpret_cast<const RowState*>(partial + rows_ * columns_);
      for (int r = 0; r < rows_; ++r) merge_row(state_[r], o_row(r), states[r], partial + r * columns_, columns_);
    }
    finish();
  }

  static int64_t partial_size(int rows, int columns) {
    return static_cast<int64_t>(rows) * (columns + 2);
  }

 private:
  float* o_row(int r) {
    return o_ + r * columns_;
  }

  // Row r is head r % group of token r / group.
  int64_t query_token(int r) const {
    return p_.query_start[item_.seq] + item_.token_begin + r / group_;
  }
  int query_head(int r) const {
    return item_.kv_head * group_ + r % group_;
  }
  int position(int r) const {
    return first_position_ + r / group_;
  }

  void begin(const Item& item) {
    item_ = item;
    rows_ = (item.token_end - item.token_begin) * group_;
    const int queries = p_.query_start[item.seq + 1] - p_.query_start[item.seq];
    first_position_ = p_.seq_lens[item.seq] - queries + item.token_begin;
    kv_end_ = first_position_ + (item.token_end - item.token_begin);
    kv_begin_ = p_.window > 0 ? std::max(0, first_position_ - p_.window + 1) : 0;
    dispatch(p_.dtype, [&]<class T>(T) { load_queries<T>(); });
    std::fill_n(state_, rows_, RowState{kNegInf, 0.0f});
    std::fill_n(o_, rows_ * columns_, 0.0f);
  }

  template <class T>
  void load_queries() {
    for (int r = 0; r < rows_; ++r) {
      const int64_t offset = query_token(r) * p_.q_stride + static_cast<int64_t>(query_head(r)) * p_.head_dim;
      const T* row = static_cast<const T*>(p_.q) + offset;
      for_each_vector(p_.head_dim, [&](int64_t i, int64_t lanes) {
        store(q_ + r * columns_ + i, load_lanes(row + i, lanes) * p_.scale);
      });
    }
  }

  void run_split(int split) {
    std::fill_n(part_o_, rows_ * columns_, 0.0f);
    std::fill_n(part_state_, rows_, RowState{kNegInf, 0.0f});
    const int end = std::min((split + 1) * kSplit, kv_end_);
    const int begin = std::max(split * kSplit, kv_begin_ / kTile * kTile);
    if constexpr (sizeof(C) == 2) {
      if (rows_ <= kFewRows && p_.head_dim % kLanes == 0) return run_few_rows(begin, end);
    }
    for (int tile = begin; tile < end; tile += kTile) {
      gather(tile);
      multiply(q_, columns_, rows_, keys_, kTile, p_.head_dim, scores_, kTile, kTile, false);
      for (int r = 0; r < rows_; ++r) softmax_row(r, tile);
      multiply(scores_, kTile, rows_, values_, columns_, kTile, part_o_, columns_, columns_, true);
    }
  }

  // Of a tile's positions, where the keys and values lie; zeros for those that no row sees.
  struct TileRows {
    std::array<const C*, kTile> keys, values;
  };

  // Finds the rows and has them brought into the cache: a head's rows lie too far apart for the hardware to guess.
  void find_rows(int tile, TileRows& rows) const {
    rows.keys.fill(zeros_);
    rows.values.fill(zeros_);
    const int64_t row = static_cast<int64_t>(p_.kv_heads) * p_.head_dim;
    const int first = std::max(tile, kv_begin_), last = std::min(tile + kTile, kv_end_);
    for (int j = first; j < last; ++j) {
      const int64_t offset = slot(j) * row + static_cast<int64_t>(item_.kv_head) * p_.head_dim;
      rows.keys[j - tile] = static_cast<const C*>(p_.k_cache) + offset;
      rows.values[j - tile] = static_cast<const C*>(p_.v_cache) + offset;
      for (int d = 0; d < p_.head_dim; d += 64 / static_cast<int>(sizeof(C))) {
        __builtin_prefetch(rows.keys[j - tile] + d);
        __builtin_prefetch(rows.values[j - tile] + d);
      }
    }
  }

  void run_few_rows(int begin, int end) {
    static_assert(kFewRows == 4);
    switch (rows_) {
      case 1: return run_tiles<1>(begin, end);
      case 2: return run_tiles<2>(begin, end);
      case 3: return run_tiles<3>(begin, end);
      default: return run_tiles<4>(begin, end);
    }
  }

  template <int kRows>
  void run_tiles(int begin, int end) {
    TileRows now, next;
    if (begin < end) find_rows(begin, next);
    for (int tile = begin; tile < end; tile += kTile) {
      now = next;
      if (tile + kTile < end) find_rows(tile + kTile, next);
      const int seen = std::min(kTile, kv_end_ - tile);
      multiply_keys<kRows>(q_, columns_, now.keys.data(), (seen + kLanes - 1) / kLanes * kLanes, p_.head_dim, scores_,
                           kTile);
      for (int r = 0; r < kRows; ++r) softmax_row(r, tile);
      multiply_values<kRows>(scores_, kTile, now.values.data(), seen, columns_, part_o_);
    }
  }

  // K transposed to [head_dim, 64] and V to [64, head_dim]; positions that no row sees are zeros and never read.
  void gather(int tile) {
    const int first = std::max(tile, kv_begin_), last = std::min(tile + kTile, kv_end_);
    const int64_t row = static_cast<int64_t>(p_.kv_heads) * p_.head_dim;
    for (int j0 = tile; j0 < tile + kTile; j0 += kLanes) {
      const C* keys[kLanes] = {};
      for (int j = std::max(j0, first); j < std::min(j0 + kLanes, last); ++j) {
        const int64_t offset = slot(j) * row + static_cast<int64_t>(item_.kv_head) * p_.head_dim;
        keys[j - j0] = static_cast<const C*>(p_.k_cache) + offset;
      }
      for_each_vector(p_.head_dim, [&](int64_t d, int64_t lanes) {
        f32v block[kLanes];
        for (int i = 0; i < kLanes; ++i) block[i] = keys[i] != nullptr ? load_lanes(keys[i] + d, lanes) : f32v{};
        transpose(block);
        for (int i = 0; i < kLanes; ++i) store(keys_ + (d + i) * kTile + (j0 - tile), block[i]);
      });
    }
    for (int j = tile; j < tile + kTile; ++j) {
      float* value = values_ + (j - tile) * columns_;
      if (j < first || j >= last) {
        std::fill_n(value, columns_, 0.0f);
        continue;
      }
      const int64_t offset = slot(j) * row + static_cast<int64_t>(item_.kv_head) * p_.head_dim;
      const C* cached = static_cast<const C*>(p_.v_cache) + offset;
      for_each_vector(p_.head_dim, [&](int64_t i, int64_t lanes) { store(value + i, load_lanes(cached + i, lanes)); });
    }
  }

  int64_t slot(int position) const {
    const int64_t entry = position / p_.block_size;
    const int32_t block = p_.block_table[item_.seq * p_.max_blocks + entry];
    if (block < 0 || block >= p_.num_blocks) {
      throw std::runtime_error("paged_attention: block_table[" + std::to_string(item_.seq) + ", " +
                               std::to_string(entry) + "] must be in 0.." + std::to_string(p_.num_blocks - 1) +
                               ", got " + std::to_string(block));
    }
    return static_cast<int64_t>(block) * p_.block_size + position % p_.block_size;
  }

  // Scores of one row become probabilities relative to the new maximum; O and the sum are rescaled to it.
  void softmax_row(int r, int tile) {
    float* scores = scores_ + r * kTile;
    const int last = position(r) - tile;  // within the tile
    const int first = p_.window > 0 ? last - p_.window + 1 : -tile;
    f32v largest = broadcast(kNegInf);
    i32v lane;
    for (int i = 0; i < kLanes; ++i) lane[i] = i;
    for (int j = 0; j < kTile; j += kLanes) {
      f32v s = load(scores + j);
      if (p_.softcap > 0.0f) s = p_.softcap * tanh(s * (1.0f / p_.softcap));
      s = select((lane + j <= last) & (lane + j >= first), s, broadcast(kNegInf));
      store(scores + j, s);
      largest = max(largest, s);
    }
    RowState& state = part_state_[r];
    const float maximum = std::max(reduce_max(largest), state.maximum);  // in this order a NaN on the left stays
    if (last < 0 || first >= kTile) {  // nothing visible: told by position, as the maximum can lose a NaN
      std::fill_n(scores, kTile, 0.0f);
      return;
    }
    f32v sum{};
    for (int j = 0; j < kTile; j += kLanes) {
      const f32v probability = exp(load(scores + j) - maximum);
      store(scores + j, probability);
      sum += probability;
    }
    const float rescale = std::exp(state.maximum - maximum);
    state = {maximum, state.sum * rescale + reduce_add(sum)};
    if (rescale == 1.0f) return;
    for (int i = 0; i < columns_; i += kLanes) {
      store(part_o_ + r * columns_ + i, load(part_o_ + r * columns_ + i) * rescale);
    }
  }

  void finish() {
    dispatch(p_.dtype, [&]<class T>(T) { store_output<T>(); });
  }

  template <class T>
  void store_output() {
    for (int r = 0; r < rows_; ++r) {
      auto [maximum, sum] = state_[r];
      float factor = 1.0f;
      if (p_.sinks != nullptr) {
        const float sink = p_.sinks[query_head(r)];
        const float with_sink = std::max(maximum, sink);
        if (with_sink != kNegInf) {
          factor = std::exp(maximum - with_sink);
          sum = sum * factor + std::exp(sink - with_sink);
          maximum = with_sink;
        }
      }
      const float inverse = sum == 0.0f ? 0.0f : factor / sum;  // 0: no visible position; NaN must show
      const int64_t row = query_token(r) * p_.q_heads + query_head(r);
      T* out = static_cast<T*>(p_.out) + row * p_.head_dim;
      for_each_vector(p_.head_dim,
                      [&](int64_t i, int64_t lanes) { store_lanes(out + i, load(o_row(r) + i) * inverse, lanes); });
      if (p_.lse != nullptr) p_.lse[row] = sum == 0.0f ? kNegInf : maximum + std::log(sum);
    }
  }

  const PagedAttentionParams& p_;
  Item item_{};
  int group_, columns_;
  int rows_ = 0, first_position_ = 0, kv_begin_ = 0, kv_end_ = 0;
  float *q_, *part_o_, *o_, *scores_, *keys_, *values_;
  const C* zeros_;  // stands for a position that no row sees
  RowState *part_state_, *state_;
};

// Every thread takes the next item until none is left: items differ too much in cost for a static partition.
template <class Fn>
void for_each_item(int64_t items, const Fn& fn) {
  std::atomic<int64_t> next{0};
  parallel_for(std::min<int64_t>(num_threads(), items),
               [&](int64_t, int64_t) { fn([&] { return next.fetch_add(1, std::memory_order_relaxed); }); });
}

template <class C>
void run(const PagedAttentionParams& p) {
  const int group = p.q_heads / p.kv_heads;
  const int tile_tokens = std::max(1, kTargetRows / group);
  const int columns = (p.head_dim + kLanes - 1) / kLanes * kLanes;

  // Two passes over the sequences: count, then fill.
  int64_t item_count = 0, merge_count = 0, partial_count = 0;
  Item* items = nullptr;
  Item* merges = nullptr;
  for (const bool fill : {false, true}) {
    if (fill) {
      items = scratch_array<Item>(0, item_count + merge_count);
      merges = items + item_count;
    }
    item_count = merge_count = partial_count = 0;
    for (int seq = 0; seq < p.seqs; ++seq) {
      const int queries = p.query_start[seq + 1] - p.query_start[seq];
      const int splits = (p.seq_lens[seq] + kSplit - 1) / kSplit;
      for (int head = 0; head < p.kv_heads; ++head) {
        if (queries == 1 && splits > 1) {
          if (fill) merges[merge_count] = {seq, head, 0, 1, 0, splits, partial_count};
          ++merge_count;
          for (int split = 0; split < splits; ++split, ++item_count, ++partial_count) {
            if (fill) items[item_count] = {seq, head, 0, 1, split, split + 1, partial_count};
          }
          continue;
        }
        // Last tiles first: they see the most positions.
        for (int end = queries; end > 0; end -= tile_tokens, ++item_count) {
          if (fill) items[item_count] = {seq, head, std::max(0, end - tile_tokens), end, 0, splits, -1};
        }
      }
    }
  }

  float* partials = scratch_array<float>(2, partial_count * Worker<C>::partial_size(group, columns));
  for_each_item(item_count, [&](auto&& next) {
    Worker<C> worker(p, tile_tokens * group);
    for (int64_t i = next(); i < item_count; i = next()) worker.run(items[i], partials);
  });
  for_each_item(merge_count, [&](auto&& next) {
    Worker<C> worker(p, group);
    for (int64_t i = next(); i < merge_count; i = next()) worker.run_merge(merges[i], partials);
  });
}

}  // namespace

void paged_attention(const PagedAttentionParams& p) {
  dispatch(p.cache_dtype, [&]<class C>(C) { run<C>(p); });
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
