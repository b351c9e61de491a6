// Splits a call's work between the threads: into tasks of some query rows each and, if there are few tasks, into pieces
// of the cache that a task reads. No split changes a result.
#pragma once

#include "attention/query_tile_attention_cpu.h"

namespace fastinfer::cpu::FASTINFER_ISA {

// Query rows of a task, to share the converted K and V. In bf16 more pay, because converting takes a larger part.
#if defined(FASTINFER_BF16_PROMPTS)
inline constexpr int kTargetRows = 256;
#else
inline constexpr int kTargetRows = 128;
#endif
inline constexpr int kFewestRows = 16;  // if there are too few tasks for the threads
// Tiles of one query that pay for waking a thread, and for sharing work with a thread that is awake: 1 to 3 us.
inline constexpr int kTilesToWake = 8, kTilesPerThread = 2;
inline constexpr int kPiecesPerThread = 4;  // so that a thread which is done early finds more to do

struct AttentionTask {
  QueryTile rows;
  int tile_begin, tile_end;
  int unit;          // tiles that leave one state each: 1 or a split; 0: all, which leave the result
  int pieces;        // pieces that are not finished
  int64_t partials;  // offset of the units' states

  bool is_last_of_split(int tile) const {
    return tile + 1 == tile_end || (tile + 1) % kSplit == 0;
  }
};

struct AttentionPiece {
  int task;
  int tile_begin, tile_end;
};

// A sequence's first queries, where it has more of them than positions: they see nothing.
inline int blind_queries(const PagedAttentionParams& p, int seq, int kv_head) {
  return std::max(0, p.query_start[seq + 1] - p.query_start[seq] - p.seq_lens[p.table_row(seq, kv_head)]);
}

// The queries of a sequence that this kernel computes, of prompts in bf16 or up to the first of a prompt.
inline Range queries_of(const PagedAttentionParams& p, int seq) {
  const int64_t start = p.query_start[seq], end = std::min<int64_t>(p.query_start[seq + 1], p.m);
#if defined(FASTINFER_BF16_PROMPTS)
  const int64_t first = std::max(start, p.first_prompt_row);
#else
  const int64_t first = start;
#endif
  if (first >= end) return {0, 0};
  return {static_cast<int>(first - start), static_cast<int>(end - start)};
}

inline int ceil_div(int64_t a, int64_t b) {
  return static_cast<int>((a + b - 1) / b);
}

class AttentionTasks {
 public:
  explicit AttentionTasks(const PagedAttentionParams& p) : p_(p), group_(p.q_heads / p.kv_heads) {
    int64_t tiles = 0, tokens = 0, work = 0;
    for (int seq = 0; seq < p.seqs; ++seq) {
      int64_t own = 0;
      for (int head = 0; head < p.kv_heads; ++head) own += ceil_div(p.seq_lens[p.table_row(seq, head)], kTile);
      const Range queries = queries_of(p, seq);
      if (queries.first < queries.end) tiles += own;
      tokens += queries.end - queries.first;
      work += own * (queries.end - queries.first);
    }
    threads_ = static_cast<int>(std::clamp<int64_t>(work / kTilesToWake, 1, num_threads()));
    if (threads_ < num_threads()) {
      threads_ = static_cast<int>(
          std::clamp<int64_t>(work / kTilesPerThread, threads_, std::max(threads_, num_awake_threads())));
    }
    const int parts = threads_ == 1 ? 1 : threads_ * kPiecesPerThread;
    const int target_rows =
        tiles >= parts ? kTargetRows : std::clamp(ceil_div(tokens * p.q_heads, parts), kFewestRows, kTargetRows);
    task_tokens_ = std::max(1, target_rows / group_);
    if (task_tokens_ > kTile) task_tokens_ -= task_tokens_ % kTile;  // only one tile is then seen in part

    int64_t tasks = 0, cost = 0;
    for_each_task([&](const AttentionTask& task) { ++tasks, cost += cost_of(task); });
    tasks_ = scratch_array<AttentionTask>(0, tasks);
    // cut() is asked for at most tasks + parts pieces, and makes up to 2 n + 2 of n by rounding to splits.
    pieces_ = scratch_array<AttentionPiece>(2, 4 * tasks + 2 * parts);
    for_each_task([&](AttentionTask task) {
      cut(task, parts == 1 ? 1 : ceil_div(cost_of(task) * parts, cost));
      tasks_[task_count_++] = task;
    });
    partials_ = scratch_array<float>(3, partial_size_);
  }

  int pieces() const {
    return piece_count_;
  }
  int threads() const {
    return threads_;
  }
  const AttentionPiece& piece(int index) const {
    return pieces_[index];
  }
  AttentionTask& task(const AttentionPiece& piece) const {
    return tasks_[piece.task];
  }
  int max_rows() const {
    return task_tokens_ * group_;
  }

  // The state of the unit that `tile` belongs to.
  AttentionState partial(const AttentionTask& task, int tile) const {
    const int64_t index = tile / task.unit - task.tile_begin / task.unit;
    return AttentionState::at(partials_ + task.partials + index * state_size(task), rows_of(task));
  }

 private:
  int rows_of(const AttentionTask& task) const {
    return (task.rows.token_end - task.rows.token_begin) * group_;
  }
  int64_t state_size(const AttentionTask& task) const {
    return AttentionState::size(rows_of(task), value_columns_of(p_));
  }
  int64_t cost_of(const AttentionTask& task) const {
    return int64_t{rows_of(task)} * (task.tile_end - task.tile_begin);
  }

  // Last tokens first: they see the most positions.
  template <class Fn>
  void for_each_task(const Fn& fn) const {
    for (int seq = 0; seq < p_.seqs; ++seq) {
      const Range queries = queries_of(p_, seq);
      for (int end = queries.end; end > queries.first; end -= task_tokens_) {
        for (int head = 0; head < p_.kv_heads; ++head) {
          const int before = p_.seq_lens[p_.table_row(seq, head)] - (p_.query_start[seq + 1] - p_.query_start[seq]);
          const int begin = std::max({queries.first, end - task_tokens_, blind_queries(p_, seq, head)});
          if (begin >= end) continue;
          const int first = p_.first_visible(before + begin);
          fn(AttentionTask{{seq, head, begin, end}, first / kTile, ceil_div(before + end, kTile), 0, 1, 0});
        }
      }
    }
  }

  void cut(AttentionTask& task, int pieces) {
    int step = ceil_div(task.tile_end - task.tile_begin, pieces);
    if (step < task.tile_end - task.tile_begin) {
      task.unit = step < kSplit ? 1 : kSplit;
      step = step / task.unit * task.unit;
      task.partials = partial_size_;
      partial_size_ += ((task.tile_end - 1) / task.unit - task.tile_begin / task.unit + 1) * state_size(task);
    }
    task.pieces = 0;
    for (int begin = task.tile_begin; begin < task.tile_end; ++task.pieces) {
      const int from = task.unit == kSplit ? begin / kSplit * kSplit : begin;
      const int end = std::min(from + step, task.tile_end);
      pieces_[piece_count_++] = {task_count_, begin, end};
      begin = end;
    }
  }

  const PagedAttentionParams& p_;
  const int group_;
  int threads_ = 1;
  int task_tokens_ = 1;
  AttentionTask* tasks_ = nullptr;
  AttentionPiece* pieces_ = nullptr;
  float* partials_ = nullptr;
  int task_count_ = 0, piece_count_ = 0;
  int64_t partial_size_ = 0;
};

}  // namespace fastinfer::cpu::FASTINFER_ISA
