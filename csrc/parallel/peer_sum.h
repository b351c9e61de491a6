// Sums over the ranks' slots.
#pragma once

#include "common/cuda/row.h"
#include "parallel/peer_exchange.h"

namespace fastinfer::cuda {

// values[j] = the sum of element i + j over the ranks, in fp32 and in their order. All loads are issued before the
// first addition: the way over the links takes longest.
template <class T, int kCount>
__device__ void sum_of_ranks(const PeerExchange& exchange, int64_t size, int64_t i, float (&values)[kCount]) {
  Vector<T, kCount> parts[parallel::kMaxPeers];
#pragma unroll
  for (int rank = 0; rank < parallel::kMaxPeers; ++rank) {
    if (rank < size) parts[rank] = load_vector<kCount>(exchange.slot<T>(rank) + i);
  }
#pragma unroll
  for (int j = 0; j < kCount; ++j) values[j] = to_float(parts[0].values[j]);
#pragma unroll
  for (int rank = 1; rank < parallel::kMaxPeers; ++rank) {
    if (rank >= size) break;
#pragma unroll
    for (int j = 0; j < kCount; ++j) values[j] += to_float(parts[rank].values[j]);
  }
}

}  // namespace fastinfer::cuda
