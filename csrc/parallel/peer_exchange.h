// The side of a kernel in an exchange between GPUs (parallel/peer_group.h): slots, and the barrier between writing
// one's own and reading the others'.
#pragma once

#include "common/cuda/ptx.h"
#include "parallel/peer_group.h"

namespace fastinfer::cuda {

// One block's view of an exchange. All threads of the block make the same calls.
class PeerExchange {
 public:
  // The kernel before has ended.
  __device__ PeerExchange(const parallel::PeerGroup& group, int rank)
      : group_(group), rank_(rank), number_(state(rank).exchanges[blockIdx.x] + 1) {}

  // The slot of a rank in this exchange.
  template <class T>
  __device__ T* slot(int rank) const {
    const int64_t offset = number_ % 2 != 0 ? group_.slot_bytes : 0;
    return reinterpret_cast<T*>(group_.memory[rank] + sizeof(parallel::PeerState) + offset);
  }

  // Waits until this block has written its part on every rank, and sees what they wrote. An exchange has at most two
  // barriers, 0 and 1.
  __device__ void barrier(int index) const {
    __syncthreads();
    const int peer = threadIdx.x;
    if (peer < group_.size) {
      store_release_system(&state(peer).arrived[index][blockIdx.x][rank_], number_);
      wait(&state(rank_).arrived[index][blockIdx.x][peer]);
    }
    __syncthreads();
  }

  // Comes after the last barrier. A later exchange may have more blocks: those that this one does not have count it
  // too.
  __device__ void end() const {
    for (unsigned block = blockIdx.x + threadIdx.x * gridDim.x; block < parallel::kMaxExchangeBlocks;
         block += blockDim.x * gridDim.x) {
      state(rank_).exchanges[block] = number_;
    }
  }

 private:
  static constexpr int kLooks = 256;  // between looks at the clock and at the host's memory

  __device__ parallel::PeerState& state(int rank) const {
    return *reinterpret_cast<parallel::PeerState*>(group_.memory[rank]);
  }

  // A peer may be an exchange ahead.
  __device__ void wait(const uint64_t* arrived) const {
    if (load_acquire_system(arrived) >= number_) return;
    const uint64_t start = global_nanoseconds();
    for (int look = 1; load_acquire_system(arrived) < number_; ++look) {
      if (look % kLooks != 0) continue;
      if (load_acquire_system(group_.aborted) != 0) return;
      if (global_nanoseconds() - start > static_cast<uint64_t>(group_.deadline_ns)) {
        store_release_system(group_.aborted, 1);
        return;
      }
    }
  }

  const parallel::PeerGroup& group_;
  const int rank_;
  const uint64_t number_;  // of this exchange, from 1
};

}  // namespace fastinfer::cuda
