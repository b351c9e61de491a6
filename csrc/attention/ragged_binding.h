// Checks of sequences over a paged cache, for the operators that choose what each of their tokens reads.
#pragma once

#include <cstdint>

#include "binding/checks.h"

namespace fastinfer {

// The kernels find a token's sequence and its position by these. There may be more queries than tokens. All are in host
// memory; `capacity` is the number of positions that a row of the block table has.
inline void check_ragged(const Checks& check, const int32_t* query_start, const int32_t* seq_lens, int64_t seqs,
                         int64_t tokens, int64_t capacity) {
  check.require(query_start[0] == 0 && query_start[seqs] >= tokens,
                "query_start must run from 0 to at least the number of tokens, ", tokens, ", got ", query_start[0],
                " to ", query_start[seqs]);
  for (int64_t seq = 0; seq < seqs; ++seq) {
    check.require(query_start[seq + 1] >= query_start[seq], "query_start must not decrease, got ", query_start[seq],
                  " before ", query_start[seq + 1]);
    check.require(seq_lens[seq] >= 0 && seq_lens[seq] <= capacity, "seq_lens[", seq, "] must be in 0..", capacity,
                  " (its blocks), got ", seq_lens[seq]);
  }
}

}  // namespace fastinfer
