// Prefetching by waiting threads: they read the weights of a replayed graph's next kernels into their caches.
//
// Decoding is bound by memory, and one thread cannot use its whole bandwidth: while Python, a norm or a quantisation
// runs in one, the others prefetch their own part of what comes next. Decoding the default model with two threads took
// 0.95 of the time for it (80 pairs of runs in turns).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "common/api.h"

namespace fastinfer::cpu {

struct Memory {
  const void* data = nullptr;
  size_t bytes = 0;
};

// Weights in the order in which they are read. They may be freed at any time: prefetching freed memory does nothing.
using Weights = std::shared_ptr<const std::vector<Memory>>;

// The first of these is read next. This and reached() wait for nobody: they do nothing where another thread calls one
// of them, or looks at a new list, at the same moment.
void read_ahead_from_start(const Weights& weights);

// All threads are about to read this weight: what follows it is next. Does nothing for one that is not listed from the
// present place on.
FASTINFER_API void reached(const void* weight);

// A thread of a pool, which prefetches its share of every weight: of n threads number t reads the t-th part.
class WaitingReader {
 public:
  WaitingReader(int thread, int threads) : thread_(thread), threads_(threads) {}

  // Prefetches some bytes more of what comes next; false if there is nothing to do.
  bool prefetch();

 private:
  void move_to(size_t index);

  const int thread_, threads_;
  uint64_t seen_ = 0;
  Weights weights_;
  size_t index_ = 0;
  const std::byte *at_ = nullptr, *end_ = nullptr;
  int64_t left_ = 0;  // bytes that it may still prefetch before the next weight is reached
};

}  // namespace fastinfer::cpu
