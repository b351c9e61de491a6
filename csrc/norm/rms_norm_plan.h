// Launch policy of kernels with a block per row. The threads keep the row in registers, so that it is read once, or
// read it several times.
#pragma once

#include <algorithm>

#include "common/launch_config.h"

namespace fastinfer::cuda {

struct RowPlan {
  int thread_vectors;  // vectors in a thread's registers: 1 or 4; 0: the row is too long or not aligned
  LaunchConfig launch;
};

// `vector`: elements of a 16-byte access, or 1 where the row does not allow it. A short row gets a thread per vector,
// for the least latency at few rows; up to 2048 vectors (8192 fp32) the threads hold four each.
inline RowPlan plan_row(int64_t rows, int64_t hidden, int vector, size_t shared_bytes) {
  constexpr int64_t kThreads = 512, kMostThreads = 1024;
  const int64_t vectors = (hidden + vector - 1) / vector;
  const int held = vector == 1 || vectors > 4 * kThreads ? 0 : vectors <= kThreads ? 1 : 4;
  const int64_t threads = (std::max<int64_t>(vectors, 1) + std::max(held, 1) - 1) / std::max(held, 1);
  return {
      .thread_vectors = held,
      .launch = {.grid = rows,
                 .block = static_cast<unsigned>(std::min((threads + 31) / 32 * 32, kMostThreads)),
                 .shared_bytes = shared_bytes,
                 .dependent = true},
  };
}

}  // namespace fastinfer::cuda
