// Flash attention over pages. Each tile of 64 positions leaves a state of its own - maximum, sum and O of its softmax -
// that does not depend on the tiles before, so that any cut of the work gives the same bits:
//
//   S = Q K^T, softcap, mask           [rows, 64]
//   P = exp(S - maximum), and its sum
//   O = P V                            [rows, value_dim]
//
// Tiles' states are merged in order into that of their split, eight tiles at an absolute position, and the splits' into
// the rows'. Whoever finishes the last piece of some rows merges what the pieces have left.
#include "attention/paged_attention.h"

#include <atomic>

#include "attention/attention_tasks_cpu.h"

namespace fastinfer::cpu::FASTINFER_ISA {
namespace {

// Merges states in order, into the first one's memory.
class Fold {
 public:
  Fold(int rows, int columns) : rows_(rows), columns_(columns) {}

  void add(const AttentionState& state) {
    empty_ ? static_cast<void>(state_ = state) : merge(state_, state, rows_, columns_);
    empty_ = false;
  }

  const AttentionState& take() {
    empty_ = true;
    return state_;
  }

 private:
  AttentionState state_{};
  bool empty_ = true;
  const int rows_, columns_;
};

template <class C>
void run_piece(const PagedAttentionParams& p, const AttentionTasks& tasks, const AttentionPiece& piece,
               QueryTileAttention<C>& rows) {
  AttentionTask& task = tasks.task(piece);
  rows.begin(task.rows);
  Fold split(rows.rows(), value_columns_of(p)), all = split;
  if (task.unit == 0) {
    bool first_split = true, first_tile = true;
    rows.run_tiles(
        piece.tile_begin, piece.tile_end,
        [&](int) {
          return rows.scratch_state(!first_tile ? 0 : first_split ? 2 : 1);
        },
        [&](int tile, const AttentionState& state) {
          split.add(state);
          first_tile = task.is_last_of_split(tile);
          if (!first_tile) return;
          all.add(split.take());
          first_split = false;
        });
    return rows.store_output(all.take());
  }
  bool first_tile = true;
  rows.run_tiles(
      piece.tile_begin, piece.tile_end,
      [&](int tile) { return task.unit == 1 || first_tile ? tasks.partial(task, tile) : rows.scratch_state(0); },
      [&](int tile, const AttentionState& state) {
        if (task.unit == 1) return;
        split.add(state);
        first_tile = task.is_last_of_split(tile);
        if (first_tile) split.take();
      });
  if (std::atomic_ref(task.pieces).fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  for (int tile = task.tile_begin; tile < task.tile_end; ++tile) {
    const bool last = task.is_last_of_split(tile);
    if (task.unit == 1 || last) split.add(tasks.partial(task, tile));
    if (last) all.add(split.take());
  }
  rows.store_output(all.take());
}

void store_blind_queries(const PagedAttentionParams& p) {
  const int64_t row_bytes = p.value_dim * (p.dtype == DType::kFloat32 ? 4 : 2);
  const int group = p.q_heads / p.kv_heads;
  for (int seq = 0; seq < p.seqs; ++seq) {
    const Range queries = queries_of(p, seq);
    for (int kv_head = 0; kv_head < p.kv_heads; ++kv_head) {
      const int end = std::min(queries.end, blind_queries(p, seq, kv_head));
      for (int query = queries.first; query < end; ++query) {
        const int64_t row = (int64_t{p.query_start[seq]} + query) * p.q_heads + kv_head * group;
        std::fill_n(static_cast<char*>(p.out) + row * row_bytes, group * row_bytes, char{0});
        for (int r = 0; p.lse != nullptr && r < group; ++r) {
          p.lse[row + r] = p.sinks != nullptr ? p.sinks[kv_head * group + r] : kNegInf;
        }
      }
    }
  }
}

template <class C>
void run(const PagedAttentionParams& p) {
  store_blind_queries(p);
  const AttentionTasks tasks(p);
  std::atomic<int> next{0};  // pieces differ too much in cost for a static partition
  parallel_for(std::min(tasks.threads(), tasks.pieces()), [&](int64_t, int64_t) {
    QueryTileAttention<C> rows(p, tasks.max_rows());
    const auto take = [&] { return next.fetch_add(1, std::memory_order_relaxed); };
    for (int i = take(); i < tasks.pieces(); i = take()) run_piece(p, tasks, tasks.piece(i), rows);
  });
}

}  // namespace

void paged_attention(const PagedAttentionParams& p) {
  switch (p.quantization) {
    case CacheQuantization::kInt8: return run<Int8>(p);
    case CacheQuantization::kFp8: return run<E4m3>(p);
    case CacheQuantization::kInt4: return run<Int4Pair>(p);
    default: dispatch(p.cache_dtype, [&]<class C>(C) { run<C>(p); });
  }
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
