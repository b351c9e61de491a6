// Counters by which the blocks of a kernel that share a result find the last of them (common/cuda/arrival.h).
#pragma once

#include <cstdint>

#include "common/api.h"

namespace fastinfer::cuda {

// Returns `count` counters that are zero, for one kernel on a stream (a cudaStream_t) of the current device. The kernel
// leaves them at zero, so they need not be cleared before a launch. Throws std::runtime_error if there is no memory.
//
// Every stream has counters of its own, and so has every captured graph, which may be replayed on any stream. Kernels
// that share counters therefore run one after the other. No counter can stay at another value: a launch that is refused
// runs no block, and an error that ends a kernel early leaves the process without a usable context.
//
// The memory does not come from torch's allocator. A torch.cuda.MemPool may be gone before the stream is, and torch's
// trees of CUDA graphs refuse memory in a graph's pool that is neither an input nor an output. The counters of a stream
// (16 KB) are never freed. Those of a graph are used again once the graph and its executable forms are destroyed.
FASTINFER_API uint32_t* arrival_counters(void* stream, int64_t count);

}  // namespace fastinfer::cuda
