// The sum of the activations of a group's ranks, on each of them.
#pragma once

#include <cstdint>

#include "common/cpu/isa.h"
#include "common/dtype.h"
#include "parallel/peer_group.h"
#include "parallel/process_group.h"

namespace fastinfer {

struct AllReduceParams {
  parallel::Group* group;            // of CPUs
  const parallel::PeerGroup* peers;  // of GPUs
  const void* x;                     // [elements]
  void* out;                         // [elements]
  int64_t elements;
  DType dtype;  // of x and out; sums are fp32, in the order of the ranks
  int rank;
};

}  // namespace fastinfer

FASTINFER_CPU_KERNEL(all_reduce, AllReduceParams)

namespace fastinfer::cuda {
FASTINFER_API void all_reduce(const AllReduceParams& params, void* stream);
}
