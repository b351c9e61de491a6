// A pool of threads that first work on their own share and then help each other.
//
// Thread t of n owns the t-th of n contiguous ranges, cut into a few chunks; whoever has finished its own takes chunks
// of the others. On a quiet machine that is a static partition; where another program takes a core away, the rest is
// done by the thread that runs: with a plain static partition, decoding beside two busy processes fell to a quarter.
// Workers spin for a short while after each job before they sleep, because the jobs of a decode step follow each other
// within microseconds and a futex wake-up costs more than most of them; but only where that has been so lately.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "common/api.h"

namespace fastinfer::cpu {

FASTINFER_API int num_threads();
FASTINFER_API void set_num_threads(int count);  // throws std::invalid_argument unless 1 <= count <= 1024

// How many threads would take part in a job at once: one where the others sleep, or are at work for somebody else.
FASTINFER_API int num_awake_threads();

namespace detail {
using Job = void (*)(const void* context, int64_t begin, int64_t end);
FASTINFER_API void run(int64_t items, const void* context, Job job);
}  // namespace detail

// Calls fn(begin, end) for disjoint ranges that together are 0..items; returns when all are done. An exception of fn
// reaches the caller. Nested or concurrent calls run in the calling thread alone.
template <class Fn>
void parallel_for(int64_t items, const Fn& fn) {
  detail::run(items, &fn,
              [](const void* context, int64_t begin, int64_t end) { (*static_cast<const Fn*>(context))(begin, end); });
}

// Memory that a kernel needs during one call, reused by the thread's next call: no allocation in a decode step.
// 64-byte aligned; the contents are undefined. `slot` tells apart the buffers that are alive at once.
FASTINFER_API void* scratch(int slot, size_t bytes);

template <class T>
T* scratch_array(int slot, size_t count) {
  static_assert(std::is_trivially_copyable_v<T>);
  return static_cast<T*>(scratch(slot, count * sizeof(T)));
}

}  // namespace fastinfer::cpu
