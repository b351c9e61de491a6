// The activations that the ranks of a group hold in parts, put together on each of them.
#pragma once

#include <cstdint>

#include "parallel/peer_group.h"
#include "parallel/process_group.h"

namespace fastinfer {

// Rank r has the columns starts[r] .. starts[r + 1] of every row.
struct AllGatherParams {
  parallel::Group* group;            // of CPUs
  const parallel::PeerGroup* peers;  // of GPUs
  const void* x;                     // [rows, columns of this rank]
  void* out;                         // [rows, columns of all ranks]
  int64_t rows;
  int64_t starts[parallel::kMaxRanks + 1];  // bytes
  int rank;
};

// Rank r has the rows whose ids are starts[r] .. starts[r + 1]; its other rows of x are not read.
struct AllGatherRowsParams {
  parallel::Group* group;            // of CPUs
  const parallel::PeerGroup* peers;  // of GPUs
  const void* x;                     // [rows, row_bytes]
  const int64_t* ids;                // [rows]
  void* out;                         // [rows, row_bytes]
  int64_t rows;
  int64_t row_bytes;
  int64_t start;  // of this rank
  int64_t end;
  int rank;
};

struct LocalIdsParams {
  const int64_t* ids;  // [rows]
  int64_t* out;        // [rows]
  int64_t rows;
  int64_t start;
  int64_t end;
};

namespace cpu {
FASTINFER_API void all_gather(const AllGatherParams& params);
FASTINFER_API void all_gather_rows(const AllGatherRowsParams& params);
FASTINFER_API void local_ids(const LocalIdsParams& params);
}  // namespace cpu

namespace cuda {
FASTINFER_API void all_gather(const AllGatherParams& params, void* stream);
FASTINFER_API void all_gather_rows(const AllGatherRowsParams& params, void* stream);
FASTINFER_API void local_ids(const LocalIdsParams& params, void* stream);
}  // namespace cuda

}  // namespace fastinfer
