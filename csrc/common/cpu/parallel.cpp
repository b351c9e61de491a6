#include "common/cpu/parallel.h"

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace fastinfer::cpu {
namespace {

constexpr int kMaxThreads = 1024;
// About 50 us of pauses (40 cycles each on recent cores): longer than Python needs between two operators of a decode
// step, short enough to leave the core to others when the engine is idle.
constexpr int kSpins = 4096;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

int default_num_threads() {
  if (const char* text = std::getenv("OMP_NUM_THREADS")) {
    const int count = std::atoi(text);
    if (count >= 1 && count <= kMaxThreads) return count;
  }
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
  return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

class Pool {
 public:
  explicit Pool(int threads) : threads_(threads) {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i); });
  }

  ~Pool() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
      epoch_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
  }

  int threads() const {
    return threads_;
  }

  void run(int64_t items, const void* context, detail::Job job) {
    items_ = items;
    context_ = context;
    job_ = job;
    pending_.store(threads_ - 1, std::memory_order_relaxed);
    {
      // The lock orders the new epoch against a worker that is about to sleep.
      std::lock_guard lock(mutex_);
      epoch_.fetch_add(1, std::memory_order_release);
    }
    if (sleepers_.load(std::memory_order_acquire) > 0) wake_.notify_all();
    run_part(0);
    // A worker whose core is taken by another program is helped by giving up ours.
    for (int spin = 0; pending_.load(std::memory_order_acquire) != 0; ++spin) {
      spin < kSpins ? pause() : static_cast<void>(sched_yield());
    }
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  }

 private:
  void run_part(int thread) {
    const int64_t begin = items_ * thread / threads_;
    const int64_t end = items_ * (thread + 1) / threads_;
    if (begin == end) return;
    try {
      job_(context_, begin, end);
    } catch (...) {
      std::lock_guard lock(mutex_);
      if (!error_) error_ = std::current_exception();
    }
  }

  void work(int thread) {
    uint64_t seen = 0;
    while (true) {
      seen = wait_for_job(seen);
      if (stopping_) return;
      run_part(thread);
      pending_.fetch_sub(1, std::memory_order_release);
    }
  }

  uint64_t wait_for_job(uint64_t seen) {
    for (int spin = 0; spin < kSpins; ++spin) {
      const uint64_t epoch = epoch_.load(std::memory_order_acquire);
      if (epoch != seen) return epoch;
      pause();
    }
    std::unique_lock lock(mutex_);
    sleepers_.fetch_add(1, std::memory_order_release);
    wake_.wait(lock, [&] { return epoch_.load(std::memory_order_acquire) != seen; });
    sleepers_.fetch_sub(1, std::memory_order_release);
    return epoch_.load(std::memory_order_acquire);
  }

  const int threads_;
  std::vector<std::thread> workers_;
  int64_t items_ = 0;
  const void* context_ = nullptr;
  detail::Job job_ = nullptr;
  std::exception_ptr error_;
  std::atomic<uint64_t> epoch_{0};
  std::atomic<int> pending_{0};
  std::atomic<int> sleepers_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stopping_ = false;
};

// The pool, and who may use it. Never destroyed at exit: a worker may outlive static destructors.
struct State {
  std::mutex busy;  // held during a job: whoever finds it taken runs alone
  std::unique_ptr<Pool> pool;
  std::atomic<int> threads{default_num_threads()};
};

State& state() {
  static State* const instance = [] {
    auto* created = new State;
    // A forked child has none of the parent's threads: forget the pool (its memory is lost, once) and build anew.
    pthread_atfork(nullptr, nullptr, [] {
      State& inherited = state();
      static_cast<void>(inherited.pool.release());
      new (&inherited.busy) std::mutex;
    });
    return created;
  }();
  return *instance;
}

}  // namespace

int num_threads() {
  return state().threads.load(std::memory_order_relaxed);
}

void set_num_threads(int count) {
  if (count < 1 || count > kMaxThreads) {
    throw std::invalid_argument("num_threads must be between 1 and 1024, got " + std::to_string(count));
  }
  State& s = state();
  std::lock_guard lock(s.busy);
  s.threads.store(count, std::memory_order_relaxed);
  if (s.pool && s.pool->threads() != count) s.pool.reset();
}

void detail::run(int64_t items, const void* context, Job job) {
  if (items <= 0) return;
  State& s = state();
  if (items > 1 && num_threads() > 1) {
    std::unique_lock lock(s.busy, std::try_to_lock);
    if (lock) {
      if (!s.pool) s.pool = std::make_unique<Pool>(num_threads());
      return s.pool->run(items, context, job);
    }
  }
  job(context, 0, items);
}

void* scratch(int slot, size_t bytes) {
  constexpr std::align_val_t kAlignment{64};
  constexpr int kSlots = 8;
  struct Buffer {
    void* data = nullptr;
    size_t size = 0;
    ~Buffer() {
      ::operator delete(data, kAlignment);
    }
  };
  thread_local Buffer buffers[kSlots];
  Buffer& buffer = buffers[slot];
  if (buffer.size < bytes) {
    ::operator delete(buffer.data, kAlignment);
    buffer.data = nullptr;
    buffer.size = 0;
    buffer.data = ::operator new(bytes, kAlignment);
    buffer.size = bytes;
  }
  return buffer.data;
}

}  // namespace fastinfer::cpu
