// The work plan on the device: nothing of it depends on the host, so a CUDA graph replays it. One block.
#include "attention/paged_attention_plan.h"

#include "attention/paged_attention_work_cuda.h"
#include "common/cuda/launch.h"
#include "common/cuda/ptx.h"
#include "common/cuda/reduce.h"

namespace fastinfer::cuda {
namespace {

// A block without at least two tiles has nothing to overlap: both are loaded at once, so that the second costs little.
constexpr int64_t kMinUnits = 2;

// Sum over the threads up to and including this one. warp_sums: one a warp.
__device__ int64_t inclusive_sum(int64_t value, int64_t* warp_sums) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  for (int step = 1; step < kWarpSize; step *= 2) {
    const int64_t other = __shfl_up_sync(kFullMask, value, step);
    if (lane >= step) value += other;
  }
  if (lane == kWarpSize - 1) warp_sums[warp] = value;
  __syncthreads();
  for (int i = 0; i < warp; ++i) value += warp_sums[i];
  return value;
}

__device__ int64_t units_per_head(const QueryRows& queries, int window, int head_dim) {
  int64_t units = 0;
  for (int i = 0; i < queries.row_tiles(row_tile(head_dim)); ++i) {
    units += RowTile(queries, i, window, head_dim).kv_tiles;
  }
  return units;
}

__global__ void paged_attention_plan_kernel(const __grid_constant__ PagedAttentionPlanParams p) {
  grid_dependency_wait();
  grid_dependency_launch();
  const PlanView plan(p.plan, p.blocks, p.seqs);
  const int group = p.q_heads / p.kv_heads;
  auto* const warp_sums = reinterpret_cast<int64_t*>(dynamic_shared());
  const int threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x);

  int64_t units = 0;
  for (int64_t first = 0; first < p.seqs; first += threads) {
    const int seq = static_cast<int>(first) + thread;
    int64_t own = 0;
    if (seq < p.seqs) {
      own = p.kv_heads * units_per_head(QueryRows(p.query_start, p.seq_lens, seq, group), p.window, p.head_dim);
    }
    const int64_t end = units + inclusive_sum(own, warp_sums);
    if (seq < p.seqs) plan.ends[seq] = end;
    __syncthreads();  // before warp_sums is used again
    units = plan.ends[min(first + threads, p.seqs) - 1];
  }
  const int64_t per_block = max((units + p.blocks - 1) / p.blocks, kMinUnits);
  if (thread == 0) *plan.header = {p.batch_invariant ? 0 : per_block};

  // Finds the position of a unit, and the number of tiles of its row tile.
  const auto find = [&](int64_t unit, int& tiles) {
    int64_t low = 0, high = p.seqs - 1;  // the first sequence that ends after it
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      plan.ends[middle] > unit ? high = middle : low = middle + 1;
    }
    const QueryRows queries(p.query_start, p.seq_lens, static_cast<int>(low), group);
    const int64_t before = low > 0 ? plan.ends[low - 1] : 0;
    const int64_t per_head = (plan.ends[low] - before) / p.kv_heads;
    int64_t rest = (unit - before) % per_head;
    int row_tile = 0;
    for (; rest >= (tiles = RowTile(queries, row_tile, p.window, p.head_dim).kv_tiles); ++row_tile) rest -= tiles;
    return WorkPosition{static_cast<int32_t>(low), static_cast<int32_t>((unit - before) / per_head), row_tile,
                        static_cast<int32_t>(rest)};
  };
  // Onwards to where a row tile begins, perhaps one past a head's last; returns the units between.
  const auto skip_to_row_tile = [](WorkPosition& at, int tiles) {
    if (at.kv_tile == 0) return 0;
    const int skipped = tiles - at.kv_tile;
    ++at.row_tile;
    at.kv_tile = 0;
    return skipped;
  };

  for (int block = thread; block < p.blocks; block += threads) {
    plan.arrived[block] = 0;
    plan.counts[block] = 0;
    int64_t begin = block * per_block, end = min(begin + per_block, units);
    if (begin >= units) continue;
    int tiles = 0;
    WorkPosition start = find(begin, tiles);
    if (p.batch_invariant) {
      begin += skip_to_row_tile(start, tiles);
      if (end < units) {
        WorkPosition stop = find(end, tiles);
        end += skip_to_row_tile(stop, tiles);
      }
    }
    plan.starts[block] = start;
    plan.counts[block] = static_cast<int32_t>(end - begin);
  }
}

}  // namespace

void paged_attention_plan(const PagedAttentionPlanParams& p, void* stream) {
  launch("paged_attention_plan", paged_attention_plan_kernel, kPlanLaunch, stream, p);
}

}  // namespace fastinfer::cuda
