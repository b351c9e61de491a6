// Before a product with a stack of experts: the list of its tiles of tokens. The product is gemm/gemm_kernel_cuda.h.
#include "common/cuda/launch.h"
#include "common/cuda/ptx.h"
#include "common/cuda/reduce.h"
#include "gemm/expert_tiles_cuda.h"

namespace fastinfer::cuda {
namespace {

// A warp: 32 experts at a time, whose numbers of tiles are summed up over the lanes.
__global__ void expert_tiles_kernel(GemmParams p) {
  grid_dependency_wait();
  grid_dependency_launch();
  ExpertTile* const tiles = expert_tiles(p);
  const int tokens = p.plan.tile.tokens, lane = threadIdx.x;
  int done = 0;
  for (int first = 0; first < p.expert_rows.experts; first += kWarpSize) {
    const int expert = first + lane;
    const bool exists = expert < p.expert_rows.experts;
    const int begin = exists ? p.expert_rows.start[expert] : 0, end = exists ? p.expert_rows.start[expert + 1] : 0;
    const int count = (end - begin + tokens - 1) / tokens;
    int behind = count;  // this expert's tiles and those of the lanes before
    for (int offset = 1; offset < kWarpSize; offset *= 2) {
      const int other = __shfl_up_sync(kFullMask, behind, offset);
      if (lane >= offset) behind += other;
    }
    for (int i = 0; i < count; ++i) {
      const int token = begin + i * tokens;
      tiles[1 + done + behind - count + i] = {expert, token, min(token + tokens, end)};
    }
    done += __shfl_sync(kFullMask, behind, kWarpSize - 1);
  }
  if (lane == 0) tiles[0] = {done, 0, 0};
}

}  // namespace

void list_expert_tiles(const GemmParams& p, void* stream) {
  if (p.plan.units == 0) return;
  launch("expert_tiles", expert_tiles_kernel, {.grid = 1, .block = kWarpSize, .dependent = true}, stream, p);
}

}  // namespace fastinfer::cuda
