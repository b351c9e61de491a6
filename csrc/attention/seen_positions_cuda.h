// What a token of ragged sequences sees of a paged cache.
#pragma once

#include <cstdint>

namespace fastinfer::cuda {

struct SeenPositions {
  const int32_t* blocks = nullptr;  // a row of the block table
  int count = 0;

  // Params has query_start, seq_lens, block_table, seqs, max_blocks and block_size.
  template <class Params>
  __device__ SeenPositions(const Params& p, int64_t token) {
    if (token >= p.query_start[p.seqs]) return;  // padding, which belongs to no sequence
    int64_t seq = 0, end = p.seqs;               // the last sequence that begins at or before the token
    while (end - seq > 1) {
      const int64_t middle = (seq + end) / 2;
      p.query_start[middle] <= token ? seq = middle : end = middle;
    }
    blocks = p.block_table + seq * p.max_blocks;
    // A length beyond the block table, which nobody has checked, must not lead to writes beyond the workspace.
    const int64_t own = p.seq_lens[seq] - p.query_start[seq + 1] + token + 1, most = p.max_blocks * p.block_size;
    count = static_cast<int>(own < 0 ? 0 : own < most ? own : most);
  }
};

}  // namespace fastinfer::cuda
