#include "common/cpu/read_ahead.h"

#include <pthread.h>

#include <atomic>
#include <mutex>
#include <new>

namespace fastinfer::cpu {
namespace {

// The most that a thread reads ahead until the next weight is reached: the size of a core's second cache. 2 and 8 MB,
// as much as a thread can read while Python prepares a step, were no faster.
constexpr int64_t kMostBytes = 512 << 10;
constexpr size_t kLine = 64, kLinesAtOnce = 4;

struct Upcoming {
  std::mutex mutex;  // protects the list, and its place among those who change it
  Weights weights;
  // The list's number in the upper half, the place of the next weight in the lower: what readers look at.
  std::atomic<uint64_t> place{0};
};

Upcoming& upcoming() {
  // Never destroyed: a pool's threads outlive static destructors.
  static Upcoming* const instance = [] {
    auto* created = new Upcoming;
    // Another thread may hold the lock while this one forks; the child gets a new one (the list is lost, once).
    pthread_atfork(nullptr, nullptr, [] { new (&upcoming()) Upcoming; });
    return created;
  }();
  return *instance;
}

}  // namespace

void read_ahead_from_start(const Weights& weights) {
  Upcoming& next = upcoming();
  const std::unique_lock lock(next.mutex, std::try_to_lock);
  if (!lock) return;
  uint64_t list = next.place.load(std::memory_order_relaxed) >> 32;
  if (next.weights != weights) {
    next.weights = weights;
    ++list;
  }
  next.place.store(list << 32, std::memory_order_release);
}

void reached(const void* weight) {
  if (weight == nullptr) return;
  Upcoming& next = upcoming();
  const std::unique_lock lock(next.mutex, std::try_to_lock);
  if (!lock || next.weights == nullptr) return;
  const uint64_t place = next.place.load(std::memory_order_relaxed);
  const auto& list = *next.weights;
  for (size_t i = static_cast<uint32_t>(place); i < list.size(); ++i) {
    if (list[i].data != weight) continue;
    next.place.store((place >> 32 << 32) + i + 1, std::memory_order_release);
    return;
  }
}

bool WaitingReader::prefetch() {
  Upcoming& next = upcoming();
  if (const uint64_t place = next.place.load(std::memory_order_acquire); place != seen_) {
    if (place >> 32 != seen_ >> 32) {
      const std::unique_lock lock(next.mutex, std::try_to_lock);
      if (!lock) return false;  // it tries again
      weights_ = next.weights;
    }
    seen_ = place;
    left_ = kMostBytes;
    move_to(static_cast<uint32_t>(place));
  }
  if (left_ <= 0) return false;
  for (size_t line = 0; line < kLinesAtOnce; ++line) __builtin_prefetch(at_ + line * kLine);
  at_ += kLinesAtOnce * kLine;
  left_ -= kLinesAtOnce * kLine;
  if (at_ >= end_) move_to(index_ + 1);
  return true;
}

void WaitingReader::move_to(size_t index) {
  index_ = index;
  if (weights_ == nullptr || index >= weights_->size()) {
    left_ = 0;
    return;
  }
  const auto& [data, bytes] = (*weights_)[index];
  const auto* const begin = static_cast<const std::byte*>(data);
  at_ = begin + bytes * thread_ / threads_;
  end_ = begin + bytes * (thread_ + 1) / threads_;
}

}  // namespace fastinfer::cpu
