// Rows of a table that the ranks have in parts, put together on GPUs that address each other's memory. A rank knows
// only its own ids, so it writes the rows that it has into the slots of all ranks, where the other exchanges read from
// the others' slots. A slot is as free for that: whoever begins an exchange has seen all ranks begin the last one, so
// that nobody reads what the one before it has left.
#include <algorithm>

#include "common/cuda/launch.h"
#include "parallel/all_gather.h"
#include "parallel/peer_exchange.h"
#include "parallel/peer_plan.h"

namespace fastinfer::cuda {
namespace {

constexpr unsigned kThreads = 256;  // of local_ids

// Sizes in units.
struct PeerRows {
  parallel::PeerGroup group;
  const void* x;       // [rows, width]
  const int64_t* ids;  // [rows]
  void* out;           // [rows, width]
  uint32_t rows;       // fit into a slot
  uint32_t width;
  int64_t start;  // ids of this rank
  int64_t end;
  int rank;
};

template <class Unit>
__global__ void __launch_bounds__(kExchangeThreads) all_gather_rows_kernel(const __grid_constant__ PeerRows p) {
  grid_dependency_wait();
  grid_dependency_launch();
  const PeerExchange exchange(p.group, p.rank);
  const auto size = static_cast<int>(p.group.size);

  // Calls fn(i) for this thread's units: a block has the same ones on all ranks.
  const auto each_unit = [&](auto&& fn) {
    const uint32_t units = p.rows * p.width, share = (units + gridDim.x - 1) / gridDim.x, begin = blockIdx.x * share;
    for (uint32_t i = begin + threadIdx.x; i < min(begin + share, units); i += blockDim.x) fn(i);
  };
  each_unit([&](uint32_t i) {
    const int64_t id = p.ids[i / p.width];
    if (id < p.start || id >= p.end) return;
    const Unit value = static_cast<const Unit*>(p.x)[i];
    for (int step = 0; step < size; ++step) {  // ranks begin with different peers
      exchange.slot<Unit>((p.rank + step) % size)[i] = value;
    }
  });
  exchange.barrier(0);
  const Unit* const slot = exchange.slot<const Unit>(p.rank);
  each_unit([&](uint32_t i) { static_cast<Unit*>(p.out)[i] = slot[i]; });
  exchange.end();
}

template <class Unit>
void launch_rows(const AllGatherRowsParams& p, void* stream) {
  constexpr auto kUnit = static_cast<int64_t>(sizeof(Unit));
  const int64_t most = p.peers->slot_bytes / p.row_bytes, width = p.row_bytes / kUnit;
  for (int64_t first = 0; first < p.rows; first += most) {
    const int64_t rows = std::min(most, p.rows - first);
    const PeerRows part{
        .group = *p.peers,
        .x = static_cast<const std::byte*>(p.x) + first * p.row_bytes,
        .ids = p.ids + first,
        .out = static_cast<std::byte*>(p.out) + first * p.row_bytes,
        .rows = static_cast<uint32_t>(rows),
        .width = static_cast<uint32_t>(width),
        .start = p.start,
        .end = p.end,
        .rank = p.rank,
    };
    launch("all_gather_rows", all_gather_rows_kernel<Unit>, plan_exchange(rows * width), stream, part);
  }
}

__global__ void local_ids_kernel(LocalIdsParams p) {
  grid_dependency_wait();
  grid_dependency_launch();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= p.rows) return;
  const int64_t id = p.ids[row];
  p.out[row] = id >= p.start && id < p.end ? id - p.start : 0;
}

}  // namespace

void all_gather_rows(const AllGatherRowsParams& p, void* stream) {
  check_exchanged("all_gather_rows", p.x, p.out);
  if (p.row_bytes % sizeof(uint4) == 0) return launch_rows<uint4>(p, stream);
  p.row_bytes % sizeof(uint32_t) == 0 ? launch_rows<uint32_t>(p, stream) : launch_rows<uint16_t>(p, stream);
}

void local_ids(const LocalIdsParams& p, void* stream) {
  const LaunchConfig config{.grid = (p.rows + kThreads - 1) / kThreads, .block = kThreads, .dependent = true};
  launch("local_ids", local_ids_kernel, config, stream, p);
}

}  // namespace fastinfer::cuda
