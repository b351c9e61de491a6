// Columns of the ranks' activations, put together on GPUs that address each other's memory: copies without arithmetic,
// in units of 16, 4 or 2 bytes.
#include "parallel/all_gather.h"

#include <algorithm>

#include "common/cuda/launch.h"
#include "parallel/peer_exchange.h"
#include "parallel/peer_plan.h"

namespace fastinfer::cuda {
namespace {

using parallel::kMaxPeers;

// Sizes in units.
struct PeerGather {
  parallel::PeerGroup group;
  const void* x;                   // [rows, columns of this rank]
  void* out;                       // [rows, columns of all ranks]
  uint32_t rows;                   // fit into a slot
  uint32_t starts[kMaxPeers + 1];  // the columns of rank r are starts[r] .. starts[r + 1]
  int rank;
};

// Every rank's part is cut into as many shares as there are blocks, so that a block needs the same one of all ranks.
template <class Unit>
__global__ void __launch_bounds__(kExchangeThreads) all_gather_kernel(const __grid_constant__ PeerGather p) {
  grid_dependency_wait();
  grid_dependency_launch();
  const PeerExchange exchange(p.group, p.rank);
  const auto size = static_cast<int>(p.group.size);

  // Calls fn(i, width) for this thread's units of a rank's part, which is [rows, width].
  const auto each_unit = [&](int rank, auto&& fn) {
    const uint32_t width = p.starts[rank + 1] - p.starts[rank], units = p.rows * width;
    const uint32_t share = (units + gridDim.x - 1) / gridDim.x, begin = blockIdx.x * share;
    for (uint32_t i = begin + threadIdx.x; i < min(begin + share, units); i += blockDim.x) fn(i, width);
  };
  Unit* const slot = exchange.slot<Unit>(p.rank);
  each_unit(p.rank, [&](uint32_t i, uint32_t /*width*/) { slot[i] = static_cast<const Unit*>(p.x)[i]; });
  exchange.barrier(0);
  for (int step = 0; step < size; ++step) {  // ranks begin with different peers
    const int peer = (p.rank + step) % size;
    const Unit* const part = exchange.slot<const Unit>(peer);
    Unit* const out = static_cast<Unit*>(p.out) + p.starts[peer];
    each_unit(peer, [&](uint32_t i, uint32_t width) {
      out[static_cast<int64_t>(i / width) * p.starts[size] + i % width] = part[i];
    });
  }
  exchange.end();
}

template <class Unit>
void launch_rows(const AllGatherParams& p, void* stream) {
  const parallel::PeerGroup& group = *p.peers;
  constexpr auto kUnit = static_cast<int64_t>(sizeof(Unit));
  const int64_t row_bytes = p.starts[group.size], most = group.slot_bytes / row_bytes;
  const int64_t own_bytes = p.starts[p.rank + 1] - p.starts[p.rank];
  for (int64_t first = 0; first < p.rows; first += most) {
    const int64_t rows = std::min(most, p.rows - first);
    PeerGather gather{
        .group = group,
        .x = static_cast<const std::byte*>(p.x) + first * own_bytes,
        .out = static_cast<std::byte*>(p.out) + first * row_bytes,
        .rows = static_cast<uint32_t>(rows),
        .starts = {},
        .rank = p.rank,
    };
    for (int64_t i = 0; i <= group.size; ++i) gather.starts[i] = static_cast<uint32_t>(p.starts[i] / kUnit);
    launch("all_gather", all_gather_kernel<Unit>, plan_exchange(rows * row_bytes / kUnit / group.size), stream, gather);
  }
}

}  // namespace

void all_gather(const AllGatherParams& p, void* stream) {
  check_exchanged("all_gather", p.x, p.out);
  const auto divides = [&](int64_t bytes) {
    return std::all_of(p.starts, p.starts + p.peers->size + 1, [&](int64_t start) { return start % bytes == 0; });
  };
  if (divides(sizeof(uint4))) return launch_rows<uint4>(p, stream);
  divides(sizeof(uint32_t)) ? launch_rows<uint32_t>(p, stream) : launch_rows<uint16_t>(p, stream);
}

}  // namespace fastinfer::cuda
