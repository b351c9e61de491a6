// The work of paged attention, and its plan: which block does what.
//
// A sequence's query rows (queries times the heads that share a KV head) are cut into row tiles; a row tile meets its
// positions in KV tiles, aligned at absolute positions. One row tile and one KV tile are a unit of work. All units lie
// in one line, ordered by sequence, KV head, row tile and KV tile, and every block does an equal stretch of it
// ("stream-K"). A batch-invariant plan cuts no row tile: a stretch ends where its last one does. All row tiles are then
// done in one way, a warp to 16 rows, so that a row's sums depend on its own positions alone; but one sequence that
// decodes keeps no more blocks busy than it has KV heads.
#pragma once

#include <cstdint>

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
        arrived(plan + 4 + 4 * blocks + 2 * seqs),
        counts(arrived + blocks) {}

  PlanHeader* header;
  WorkPosition* starts;  // [blocks]
  int64_t* ends;         // [seqs]: units up to and including the sequence
  int32_t* arrived;      // [blocks]: partial results of the row tile that block b ends with; 0 between calls
  int32_t* counts;       // [blocks]: units of its stretch
};

// A sequence's query rows; row r is head r % group of query r / group.
struct QueryRows {
  FASTINFER_HOST_DEVICE QueryRows(const int32_t* query_start, const int32_t* seq_lens, int seq, int group)
      : group(group),
        first_query(query_start[seq]),
        rows((query_start[seq + 1] - first_query) * group),
        first_position(seq_lens[seq] - (query_start[seq + 1] - first_query)) {}

  FASTINFER_HOST_DEVICE int row_tiles() const {
    return (rows + kRowTile - 1) / kRowTile;
  }

  int group;
  int first_query;  // among the tokens
  int rows;
  int first_position;  // of the first query, in the sequence; negative queries see nothing
};

// A row tile, and the positions that at least one of its rows sees.
struct RowTile {
  FASTINFER_HOST_DEVICE RowTile(const QueryRows& queries, int index, int window, int tile)
      : row_begin(index * kRowTile), row_end(min(row_begin + kRowTile, queries.rows)) {
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

}  // namespace fastinfer::cuda
