// The work of paged attention, and its plan: which block does what.
//
// A sequence's query rows (queries times the heads that share a KV head) are cut into row tiles; a row tile meets its
// positions in KV tiles, aligned at absolute positions. One row tile and one KV tile are a unit of work. All units lie
// in one line, ordered by sequence, KV head, row tile and KV tile, and every block does an equal stretch of it
// ("stream-K"). A batch-invariant plan cuts no row tile: a stretch ends where its last one does. All row tiles are then
// done in one way, with rows of its own for each warp, so that a row's sums depend on its own positions alone; but one
// sequence that decodes keeps no more blocks busy than it has KV heads.
#pragma once

#include <cstdint>

#include "attention/paged_attention.h"
#include "attention/paged_attention_plan.h"
#include "common/dtype.h"

namespace fastinfer::cuda {

// A place in the line of units.
struct alignas(16) WorkPosition {
  int32_t seq;
  int32_t head;  // of the KV heads
  int32_t row_tile;
  int32_t kv_tile;  // counted from the first that the row tile sees
};

struct PlanHeader {
  int64_t units_per_block;  // 0: no row tile is cut
};

// The plan tensor's parts.
struct PlanView {
  FASTINFER_HOST_DEVICE PlanView(int32_t* plan, int64_t blocks, int64_t seqs)
      : header(reinterpret_cast<PlanHeader*>(plan)),
        starts(reinterpret_cast<WorkPosition*>(plan + 4)),
        ends(reinterpret_cast<int64_t*>(plan + 4 + 4 * blocks)),
        arrived(reinterpret_cast<uint32_t*>(plan + 4 + 4 * blocks + 2 * seqs)),
        counts(plan + 4 + 5 * blocks + 2 * seqs) {}

  PlanHeader* header;
  WorkPosition* starts;  // [blocks]
  int64_t* ends;         // [seqs]: units up to and including the sequence
  uint32_t* arrived;     // [blocks]: partial results of the row tile that block b ends with; 0 between calls
  int32_t* counts;       // [blocks]: units of its stretch
};

// A sequence's query rows; row r is head r % group of query r / group.
struct QueryRows {
  FASTINFER_HOST_DEVICE QueryRows(const int32_t* query_start, const int32_t* seq_lens, int seq, int group)
      : group(group),
        first_query(query_start[seq]),
        rows((query_start[seq + 1] - first_query) * group),
        first_position(seq_lens[seq] - (query_start[seq + 1] - first_query)) {}

  FASTINFER_HOST_DEVICE int row_tiles(int row_tile) const {
    return (rows + row_tile - 1) / row_tile;
  }

  int group;
  int first_query;  // among the tokens
  int rows;
  int first_position;  // of the first query, in the sequence; negative queries see nothing
};

// A row tile, and the positions that at least one of its rows sees.
struct RowTile {
  FASTINFER_HOST_DEVICE RowTile(const QueryRows& queries, int index, int window, int head_dim)
      : row_begin(index * row_tile(head_dim)), row_end(min(row_begin + row_tile(head_dim), queries.rows)) {
    const int tile = kv_tile(head_dim);
    const int first = queries.first_position + row_begin / queries.group;
    const int last = queries.first_position + (row_end - 1) / queries.group;
    kv_begin = window > 0 ? max(first - window + 1, 0) : 0;
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
        queries(p.query_start, p.seq_lens, at.seq, p.q_heads / p.kv_heads),
        rows(queries, at.row_tile, p.window, p.head_dim),
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

// A place in the block's stretch.
struct WorkCursor {
  WorkPosition at;
  int units;  // of the stretch, from here on

  __device__ bool ended() const {
    return units <= 0;
  }
  // Onwards to the next row tile that exists.
  __device__ void settle(const PagedAttentionParams& p) {
    while (!ended() && at.seq < p.seqs) {
      const QueryRows queries(p.query_start, p.seq_lens, at.seq, p.q_heads / p.kv_heads);
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
};

}  // namespace fastinfer::cuda
