// The work of paged attention, and its plan: which block does what.
//
// A sequence's query rows (queries times the heads that share a KV head) are cut into row tiles; a row tile meets its
// positions in KV tiles, aligned at absolute positions. One row tile and one KV tile are a unit of work. All units lie
// in one line, ordered by sequence, KV head, row tile and KV tile, and every block does an equal stretch of it
// ("stream-K").
//
// A plan that is batch-invariant cuts no row tile, nor does one of prompts whose row tiles are short beside a block's
// share of the work. A block that is free then takes the next whole row tile, of each sequence the longest first. All
// row tiles are done in one way, with rows of its own for each warp, so that a row's sums depend on its own positions
// alone; but one sequence that decodes keeps no more blocks busy than it has KV heads.
#pragma once

#include <cstdint>

#include "attention/paged_attention.h"
#include "attention/paged_attention_plan.h"
#include "common/cuda/ptx.h"
#include "common/dtype.h"

namespace fastinfer::cuda {

// x / by for x that is not negative: few instructions if `by` is a power of two, as page sizes and groups mostly are.
__device__ inline int quotient(int x, int by) {
  return (by & (by - 1)) == 0 ? x >> (31 - __clz(by)) : x / by;
}

// A place in the line of units.
struct alignas(16) WorkPosition {
  int32_t seq;
  int32_t head;  // of the KV heads
  int32_t row_tile;
  int32_t kv_tile;  // counted from the first that the row tile sees
};

struct PlanHeader {
  int64_t units_per_block;  // 0: no row tile is cut
  int64_t row_tiles;        // of all KV heads, if none is cut
};

// The plan tensor's parts.
struct PlanView {
  FASTINFER_HOST_DEVICE PlanView(int32_t* plan, int64_t blocks, int64_t lens)
      : header(reinterpret_cast<PlanHeader*>(plan)),
        starts(reinterpret_cast<WorkPosition*>(plan + 4)),
        ends(reinterpret_cast<int64_t*>(plan + 4 + 4 * blocks)),
        arrived(reinterpret_cast<uint32_t*>(plan + 4 + 4 * blocks + 2 * lens)),
        counts(plan + 4 + 5 * blocks + 2 * lens) {}

  PlanHeader* header;
  WorkPosition* starts;  // [blocks]
  int64_t* ends;         // [lens]: units, or whole row tiles, up to and including what has the length
  uint32_t* arrived;     // [blocks]: partial results of the row tile that block b ends with; 0 between calls
  int32_t* counts;       // [blocks]: units of its stretch

  // If no row tile is cut: those that blocks have taken, and where a block keeps the number of its own for its threads.
  FASTINFER_HOST_DEVICE uint32_t* taken() const {
    return arrived;
  }
  FASTINFER_HOST_DEVICE int32_t* own() const {
    return counts;
  }
};

// A sequence's query rows for a KV head; row r is head r % group of query r / group.
struct QueryRows {
  FASTINFER_HOST_DEVICE QueryRows(const int32_t* query_start, int seq, int len, int group)
      : group(group),
        first_query(query_start[seq]),
        rows((query_start[seq + 1] - first_query) * group),
        first_position(len - (query_start[seq + 1] - first_query)) {}

  // Those that have the length of this number, which for sequences are those of any KV head.
  template <class Params>
  FASTINFER_HOST_DEVICE static QueryRows of_len(const Params& p, int64_t number) {
    const int64_t seq = p.table_per_head ? number / p.kv_heads : number;
    return {p.query_start, static_cast<int>(seq), p.seq_lens[number], p.q_heads / p.kv_heads};
  }
  FASTINFER_HOST_DEVICE static QueryRows of_head(const PagedAttentionParams& p, int seq, int head) {
    return {p.query_start, seq, p.seq_lens[p.table_row(seq, head)], p.q_heads / p.kv_heads};
  }

  FASTINFER_HOST_DEVICE int row_tiles(int row_tile) const {
    return (rows + row_tile - 1) / row_tile;
  }

  int group;
  int first_query;  // among the tokens
  int rows;
  int first_position;  // of the first query, in the sequence; negative queries see nothing
};

// A place among the work of the length of this number; `head` counts the KV heads that share the length.
template <class Params>
FASTINFER_HOST_DEVICE WorkPosition place_of(const Params& p, int number, int head, int row_tile, int kv_tile) {
  if (!p.table_per_head) return {number, head, row_tile, kv_tile};
  return {number / p.kv_heads, number % p.kv_heads, row_tile, kv_tile};
}

// A row tile, and the positions that at least one of its rows sees.
struct RowTile {
  FASTINFER_HOST_DEVICE RowTile(const QueryRows& queries, int index, int window, bool chunked, int head_dim)
      : row_begin(index * row_tile(head_dim)), row_end(min(row_begin + row_tile(head_dim), queries.rows)) {
    const int tile = kv_tile(head_dim);
    const int first = queries.first_position + row_begin / queries.group;
    const int last = queries.first_position + (row_end - 1) / queries.group;
    kv_begin = first_visible(first, window, chunked);
    kv_end = max(last + 1, kv_begin);
    first_kv_tile = kv_begin / tile;
    kv_tiles = max((kv_end + tile - 1) / tile - first_kv_tile, 1);  // rows that see nothing are work, too
  }

  int row_begin, row_end;
  int kv_begin, kv_end;
  int first_kv_tile, kv_tiles;
};

// What a block does at once: a row tile, or the part of it that lies in the block's stretch.
struct WorkItem {
  __device__ WorkItem(const PagedAttentionParams& p, const WorkPosition& at_, int units)
      : at(at_),
        queries(QueryRows::of_head(p, at.seq, at.head)),
        rows(queries, at.row_tile, p.window, p.chunked, p.head_dim),
        tiles(min(rows.kv_tiles - at.kv_tile, units)) {}

  __device__ int row_count() const {
    return rows.row_end - rows.row_begin;
  }
  // With a plan that cuts: do the warps share the rows?
  __device__ bool decodes() const {
    return row_count() <= kDecodeRows;
  }
  __device__ int first_position(int head_dim) const {
    return (rows.first_kv_tile + at.kv_tile) * kv_tile(head_dim);
  }

  WorkPosition at;
  QueryRows queries;
  RowTile rows;
  int tiles;  // KV tiles from at.kv_tile on
};

// A place in the block's stretch, or the row tile that the block has taken.
struct WorkCursor {
  WorkPosition at;
  int units;  // of the stretch, from here on; of a whole row tile, enough

  __device__ static WorkCursor first(const PagedAttentionParams& p) {
    const PlanView plan(p.plan, p.blocks, p.lens());
    if (plan.header->units_per_block == 0) return take(p);
    WorkCursor cursor{plan.starts[blockIdx.x], plan.counts[blockIdx.x]};
    cursor.settle(p);
    return cursor;
  }
  // Onwards from a row tile of which so many KV tiles are done. All threads of the block must call it.
  __device__ void next(const PagedAttentionParams& p, int tiles) {
    const bool cuts = PlanView(p.plan, p.blocks, p.lens()).header->units_per_block > 0;
    cuts ? advance(p, tiles) : static_cast<void>(*this = take(p));
  }
  __device__ bool ended() const {
    return units <= 0;
  }
  // Onwards to the next row tile that exists.
  __device__ void settle(const PagedAttentionParams& p) {
    while (!ended() && at.seq < p.seqs) {
      const QueryRows queries = QueryRows::of_head(p, at.seq, at.head);
      if (at.row_tile < queries.row_tiles(row_tile(p.head_dim))) return;
      at.row_tile = 0;
      at.head = queries.rows > 0 ? at.head + 1 : p.kv_heads;
      if (at.head == p.kv_heads) at.head = 0, ++at.seq;
    }
    units = 0;
  }
  __device__ void advance(const PagedAttentionParams& p, int tiles) {
    units -= tiles;
    at.kv_tile = 0;
    ++at.row_tile;
    settle(p);
  }

 private:
  // The next row tile that no block has taken.
  __device__ static WorkCursor take(const PagedAttentionParams& p) {
    const PlanView plan(p.plan, p.blocks, p.lens());
    const auto row_tiles = static_cast<uint32_t>(plan.header->row_tiles);
    if (threadIdx.x == 0) {
      const uint32_t number = add_acquire_release(plan.taken(), 1);
      // Every block finds out once that there are no more; the last one to do so leaves zero.
      if (number + 1 == row_tiles + gridDim.x) *plan.taken() = 0;
      plan.own()[blockIdx.x] = static_cast<int32_t>(number);
    }
    __syncthreads();
    const auto number = static_cast<uint32_t>(plan.own()[blockIdx.x]);
    if (number >= row_tiles) return {{}, 0};
    int low = 0, high = static_cast<int>(p.lens()) - 1;  // the first that ends after it
    while (low < high) {
      const int middle = (low + high) / 2;
      plan.ends[middle] > number ? high = middle : low = middle + 1;
    }
    const int heads = p.table_per_head ? 1 : p.kv_heads;
    const int place = static_cast<int>(number - (low > 0 ? plan.ends[low - 1] : 0)), from_last = place / heads;
    const int last = QueryRows::of_len(p, low).row_tiles(row_tile(p.head_dim)) - 1;
    return {place_of(p, low, place - from_last * heads, last - from_last, 0), INT32_MAX};
  }
};

}  // namespace fastinfer::cuda
