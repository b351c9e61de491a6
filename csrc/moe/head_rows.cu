// An integer for each row, once a step.
#include "moe/head_rows.h"

#include <algorithm>

#include "common/cuda/launch.h"
#include "common/cuda/ptx.h"

namespace fastinfer::cuda {
namespace {

constexpr int64_t kThreads = 256;
constexpr int64_t kMostBlocks = 1024;

__global__ void head_rows_kernel(HeadRowsParams p) {
  grid_dependency_wait();
  grid_dependency_launch();
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t head = first; head <= p.heads; head += threads) {
    p.head_start[head] = static_cast<int32_t>(head * p.tokens);
  }
  for (int64_t i = first; i < p.tokens * p.heads; i += threads) {
    p.row_ids[i] = static_cast<int32_t>(i % p.tokens * p.heads + i / p.tokens);
  }
}

}  // namespace

void head_rows(const HeadRowsParams& p, void* stream) {
  const int64_t blocks = (std::max<int64_t>(p.tokens * p.heads, p.heads + 1) + kThreads - 1) / kThreads;
  const LaunchConfig config{
      .grid = std::min(blocks, kMostBlocks), .block = static_cast<unsigned>(kThreads), .dependent = true};
  launch("head_rows", head_rows_kernel, config, stream, p);
}

}  // namespace fastinfer::cuda
