// Sums of the ranks' activations on GPUs that address each other's memory, in one or two shots (parallel/peer_plan.h).
// Both give the same bits: a sum is fp32 in the order of the ranks, and is rounded once.
#include "parallel/all_reduce.h"

#include <algorithm>

#include "common/cuda/launch.h"
#include "parallel/peer_plan.h"
#include "parallel/peer_sum.h"

namespace fastinfer::cuda {
namespace {

using parallel::PeerGroup;

struct PeerReduce {
  PeerGroup group;
  const void* x;    // [vectors, kCount]
  void* out;        // [vectors, kCount]
  int64_t vectors;  // fit into a slot
  int rank;
};

// The share of a block, or of a rank in it: `parts` consecutive ranges of vectors.
struct Range {
  int64_t begin, end;

  __device__ Range part(int64_t index, int64_t parts) const {
    const int64_t length = (end - begin + parts - 1) / parts, first = begin + index * length;
    return {min(first, end), min(first + length, end)};
  }

  // Calls fn(i) for this thread's vectors, i the number of a vector's first element.
  template <int kCount, class Fn>
  __device__ void each(Fn&& fn) const {
    for (int64_t v = begin + threadIdx.x; v < end; v += blockDim.x) fn(v * kCount);
  }
};

template <class T, int kCount, bool kOneShot>
__global__ void __launch_bounds__(kExchangeThreads) all_reduce_kernel(const __grid_constant__ PeerReduce p) {
  grid_dependency_wait();
  grid_dependency_launch();
  const PeerExchange exchange(p.group, p.rank);
  const int64_t size = p.group.size;
  const Range block = Range{0, p.vectors}.part(blockIdx.x, gridDim.x);
  T* const slot = exchange.slot<T>(p.rank);
  T* const out = static_cast<T*>(p.out);

  block.each<kCount>([&](int64_t i) { store_vector(slot + i, load_vector<kCount>(static_cast<const T*>(p.x) + i)); });
  exchange.barrier(0);
  const Range own = kOneShot ? block : block.part(p.rank, size);
  own.each<kCount>([&](int64_t i) {
    float sum[kCount];
    sum_of_ranks<T>(exchange, size, i, sum);
    store_values(out + i, sum);
    if constexpr (!kOneShot) store_values(slot + i, sum);  // this thread alone reads the part of the slot
  });
  if constexpr (!kOneShot) {
    exchange.barrier(1);
    for (int64_t step = 1; step < size; ++step) {  // ranks begin with different peers
      const int64_t peer = (p.rank + step) % size;
      const T* const sums = exchange.slot<T>(static_cast<int>(peer));
      block.part(peer, size).each<kCount>([&](int64_t i) { store_vector(out + i, load_vector<kCount>(sums + i)); });
    }
  }
  exchange.end();
}

template <class T, int kCount>
void launch_parts(const AllReduceParams& p, void* stream) {
  const PeerGroup& group = *p.peers;
  const int64_t most = group.slot_bytes / static_cast<int64_t>(sizeof(T));
  for (int64_t first = 0; first < p.elements; first += most) {
    const int64_t elements = std::min(most, p.elements - first), vectors = elements / kCount;
    const auto kernel = elements * static_cast<int64_t>(sizeof(T)) <= group.one_shot_bytes
                            ? all_reduce_kernel<T, kCount, true>
                            : all_reduce_kernel<T, kCount, false>;
    launch("all_reduce", kernel, plan_exchange(vectors), stream,
           PeerReduce{
               .group = group,
               .x = static_cast<const T*>(p.x) + first,
               .out = static_cast<T*>(p.out) + first,
               .vectors = vectors,
               .rank = p.rank,
           });
  }
}

}  // namespace

void all_reduce(const AllReduceParams& p, void* stream) {
  check_exchanged("all_reduce", p.x, p.out);
  dispatch_cuda(p.dtype, [&]<class T>(T) {
    constexpr int kVector = kVectorElements<T>;
    p.elements % kVector == 0 ? launch_parts<T, kVector>(p, stream) : launch_parts<T, 1>(p, stream);
  });
}

}  // namespace fastinfer::cuda
