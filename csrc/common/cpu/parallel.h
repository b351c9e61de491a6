// A pool of threads with static partition: thread t of n always gets the t-th of n equal, contiguous ranges.
//
// Workers spin for a short while after each job before they sleep, because the jobs of a decode step follow each other
// within microseconds and a futex wake-up costs more than most of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace fastinfer::cpu {

int num_threads();
void set_num_threads(int count);  // throws std::invalid_argument unless 1 <= count <= 1024

namespace detail {
using Job = void (*)(const void* context, int64_t begin, int64_t end);
void run(int64_t items, const void* context, Job job);
}  // namespace detail

// Calls fn(begin, end) on every thread that gets a non-empty range of 0..items; returns when all are done. An exception
// of fn reaches the caller. Nested or concurrent calls run in the calling thread alone.
template <class Fn>
void parallel_for(int64_t items, const Fn& fn) {
  detail::run(items, &fn,
              [](const void* context, int64_t begin, int64_t end) { (*static_cast<const Fn*>(context))(begin, end); });
}

// Memory that a kernel needs during one call, reused by the thread's next call: no allocation in a decode step.
// 64-byte aligned; the contents are undefined. `slot` tells apart the buffers that are alive at once.
void* scratch(int slot, size_t bytes);

template <class T>
T* scratch_array(int slot, size_t count) {
  static_assert(std::is_trivially_copyable_v<T>);
  return static_cast<T*>(scratch(slot, count * sizeof(T)));
}

}  // namespace fastinfer::cpu
