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

// Row tiles of prompts stay whole if the longest has at most so much of a block's even share. A block that is alone on
// its multiprocessor runs faster, so the longest may exceed the share.
constexpr int64_t kMostLongestPercent = 180;
// And if the rounds that blocks need for row tiles of the average length take at most so much of the share.
constexpr int64_t kMostRoundsPercent = 130;

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

// Units of a KV head of a sequence; `longest` becomes at least those of its longest row tile.
__device__ int64_t units_per_head(const QueryRows& queries, const PagedAttentionPlanParams& p, int64_t& longest) {
  int64_t units = 0;
  for (int i = 0; i < queries.row_tiles(row_tile(p.head_dim)); ++i) {
    const int64_t own = RowTile(queries, i, p.window, p.chunked, p.head_dim).kv_tiles;
    units += own, longest = max(longest, own);
  }
  return units;
}

__global__ void paged_attention_plan_kernel(const __grid_constant__ PagedAttentionPlanParams p) {
  grid_dependency_wait();
  grid_dependency_launch();
  const PlanView plan(p.plan, p.blocks, p.lens());
  const int heads = p.table_per_head ? 1 : p.kv_heads;  // that share a length
  auto* const warp_sums = reinterpret_cast<int64_t*>(dynamic_shared());
  const int threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x);

  // Writes `ends`: sums of count(the rows of a length). Returns the last one.
  const auto add_up = [&](const auto& count) {
    int64_t sum = 0;
    for (int64_t first = 0; first < p.lens(); first += threads) {
      const int64_t number = first + thread;
      const int64_t own = number < p.lens() ? count(QueryRows::of_len(p, number)) : 0;
      const int64_t end = sum + inclusive_sum(own, warp_sums);
      if (number < p.lens()) plan.ends[number] = end;
      __syncthreads();  // before warp_sums is used again
      sum = plan.ends[min(first + threads, p.lens()) - 1];
    }
    return sum;
  };
  const auto row_tiles_of = [&](const QueryRows& queries) {
    return int64_t{heads} * queries.row_tiles(row_tile(p.head_dim));
  };
  const int64_t row_tiles = add_up(row_tiles_of);
  int64_t longest = 0;   // of this thread's sequences, as `decodes`
  bool decodes = false;  // has rows for decode
  const int64_t units = add_up([&](const QueryRows& queries) {
    decodes |= queries.rows > 0 && queries.rows <= kDecodeRows;
    return heads * units_per_head(queries, p, longest);
  });
  const int64_t per_block = max((units + p.blocks - 1) / p.blocks, kMinUnits);
  const int64_t rounds = (row_tiles + p.blocks - 1) / p.blocks;
  const bool uneven = rounds * units * 100 > row_tiles * per_block * kMostRoundsPercent;
  const bool cuts = __syncthreads_or(decodes || uneven || longest * 100 > per_block * kMostLongestPercent) != 0;
  if (p.batch_invariant || !cuts) {
    add_up(row_tiles_of);
    if (thread == 0) *plan.header = {0, row_tiles}, *plan.taken() = 0;
    return;
  }
  if (thread == 0) *plan.header = {per_block, 0};

  // The position of a unit.
  const auto find = [&](int64_t unit) {
    int64_t low = 0, high = p.lens() - 1;  // the first that ends after it
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      plan.ends[middle] > unit ? high = middle : low = middle + 1;
    }
    const QueryRows queries = QueryRows::of_len(p, low);
    const int64_t before = low > 0 ? plan.ends[low - 1] : 0;
    const int64_t per_head = (plan.ends[low] - before) / heads;
    int64_t rest = (unit - before) % per_head;
    int row_tile = 0, tiles = 0;
    const auto tiles_of = [&](int index) { return RowTile(queries, index, p.window, p.chunked, p.head_dim).kv_tiles; };
    for (; rest >= (tiles = tiles_of(row_tile)); ++row_tile) rest -= tiles;
    const auto head = static_cast<int>((unit - before) / per_head);
    return place_of(p, static_cast<int>(low), head, row_tile, static_cast<int>(rest));
  };
  for (int block = thread; block < p.blocks; block += threads) {
    plan.arrived[block] = 0;
    plan.counts[block] = 0;
    const int64_t begin = block * per_block;
    if (begin >= units) continue;
    plan.starts[block] = find(begin);
    plan.counts[block] = static_cast<int32_t>(min(per_block, units - begin));
  }
}

}  // namespace

void paged_attention_plan(const PagedAttentionPlanParams& p, void* stream) {
  launch("paged_attention_plan", paged_attention_plan_kernel, kPlanLaunch, stream, p);
}

}  // namespace fastinfer::cuda
