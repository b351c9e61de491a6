#include "common/cpu/parallel.h"

#include <pthread.h>
#include <sched.h>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "common/cpu/read_ahead.h"

namespace fastinfer::cpu {
namespace {

constexpr int kMaxThreads = 1024;
// About 50 us of pauses (40 cycles each on recent cores), after which a caller gives its core to a late worker.
constexpr int kSpins = 4096;
// A worker that has waited for less than kShortWait spins so long the next time: longer than Python needs between two
// operators of a model that calls them one by one, where waking up would cost as much as an operator (a decoding step
// of transformers took 32 ms with 50 us, 24 with 200). One that has waited longer does not: between two of our
// operators others may want its core, and torch's own threads did badly beside one that spins. Reading ahead, which
// comes first, ends by itself.
constexpr std::chrono::microseconds kShortWait{200};
constexpr int kLongSpins = 16384, kFewSpins = 512;
// Enough that a thread which lost its core leaves most of its share to others, few enough that taking them (a few
// nanoseconds each) does not show.
constexpr int kChunksPerThread = 4;

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
  explicit Pool(int threads) : threads_(threads), shares_(std::make_unique<Share[]>(threads)) {
    try {
      for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i); });
    } catch (const std::system_error& error) {
      stop();
      throw std::runtime_error("fastinfer could not start " + std::to_string(threads) + " threads (" + error.what() +
                               "); OMP_NUM_THREADS or set_num_threads ask for fewer");
    }
  }

  ~Pool() {
    stop();
  }

  int threads() const {
    return threads_;
  }

  int awake() const {
    return threads_ - sleepers_.load(std::memory_order_relaxed);
  }

  void run(int64_t items, const void* context, detail::Job job) {
    items_ = items;
    context_ = context;
    job_ = job;
    remaining_.store(threads_ * kChunksPerThread, std::memory_order_relaxed);
    const uint32_t epoch = epoch_.load(std::memory_order_relaxed) + 1;
    for (int t = 0; t < threads_; ++t) {
      shares_[t].cursor.store(uint64_t{epoch} << 32, std::memory_order_release);
    }
    {
      // The lock orders the new epoch against a worker that is about to sleep.
      std::lock_guard lock(mutex_);
      epoch_.store(epoch, std::memory_order_release);
    }
    if (sleepers_.load(std::memory_order_acquire) > 0) wake_.notify_all();
    run_chunks(0, epoch);
    // A worker whose core is taken by another program, in the middle of a chunk, is helped by giving up ours.
    for (int spin = 0; remaining_.load(std::memory_order_acquire) != 0; ++spin) {
      spin < kSpins ? pause() : static_cast<void>(sched_yield());
    }
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  }

 private:
  void stop() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
      epoch_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
    workers_.clear();
  }

  // A thread's chunks: the job's epoch in the upper half, how many are taken in the lower.
  struct alignas(64) Share {
    std::atomic<uint64_t> cursor{0};
  };

  // The number of a chunk of thread `owner` that is now ours, or -1. It is refused once the job is over, so a worker
  // that comes late touches nothing; and while it is granted the job cannot end, so what the job consists of stays put.
  int take(int owner, uint32_t epoch) {
    uint64_t cursor = shares_[owner].cursor.load(std::memory_order_acquire);
    do {
      const auto taken = static_cast<uint32_t>(cursor);
      if (cursor >> 32 != epoch || taken >= kChunksPerThread) return -1;
    } while (!shares_[owner].cursor.compare_exchange_weak(cursor, cursor + 1, std::memory_order_acquire));
    return owner * kChunksPerThread + static_cast<int>(static_cast<uint32_t>(cursor));
  }

  void run_chunks(int thread, uint32_t epoch) {
    for (int i = 0; i < threads_; ++i) {
      const int owner = (thread + i) % threads_;
      for (int chunk = take(owner, epoch); chunk >= 0; chunk = take(owner, epoch)) run_chunk(chunk);
    }
  }

  void run_chunk(int chunk) {
    const int64_t chunks = int64_t{threads_} * kChunksPerThread;
    const int64_t begin = items_ * chunk / chunks, end = items_ * (chunk + 1) / chunks;
    try {
      if (begin < end) job_(context_, begin, end);
    } catch (...) {
      std::lock_guard lock(mutex_);
      if (!error_) error_ = std::current_exception();
    }
    // Releases to the waiting caller alone: two chunks of a job are never ordered, so that ThreadSanitizer sees what
    // they share.
    remaining_.fetch_sub(1, std::memory_order_release);
  }

  void work(int thread) {
    uint32_t seen = 0;
    int spins = kLongSpins;
    WaitingReader reader(thread, threads_);
    while (true) {
      seen = wait_for_job(seen, spins, reader);
      if (stopping_) return;
      run_chunks(thread, seen);
    }
  }

  uint32_t wait_for_job(uint32_t seen, int& spins, WaitingReader& reader) {
    const auto begin = std::chrono::steady_clock::now();
    for (int spin = 0; spin < spins;) {
      const uint32_t epoch = epoch_.load(std::memory_order_acquire);
      if (epoch != seen) return epoch;
      if (reader.prefetch()) continue;
      pause();
      ++spin;
    }
    std::unique_lock lock(mutex_);
    sleepers_.fetch_add(1, std::memory_order_release);
    wake_.wait(lock, [&] { return epoch_.load(std::memory_order_acquire) != seen; });
    sleepers_.fetch_sub(1, std::memory_order_release);
    spins = std::chrono::steady_clock::now() - begin < kShortWait ? kLongSpins : kFewSpins;
    return epoch_.load(std::memory_order_acquire);
  }

  const int threads_;
  const std::unique_ptr<Share[]> shares_;
  std::vector<std::thread> workers_;
  int64_t items_ = 0;
  const void* context_ = nullptr;
  detail::Job job_ = nullptr;
  std::exception_ptr error_;
  std::atomic<uint32_t> epoch_{0};
  std::atomic<int> remaining_{0};
  std::atomic<int> sleepers_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<bool> stopping_{false};
};

// The pool, and who may use it. Never destroyed at exit: a worker may outlive static destructors.
struct State {
  std::atomic<bool> busy{false};  // set during a job: whoever finds it set runs alone
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
      inherited.busy.store(false);
    });
    return created;
  }();
  return *instance;
}

class Busy {
 public:
  explicit Busy(State& state) : state_(state), taken_(!state.busy.exchange(true, std::memory_order_acquire)) {}
  ~Busy() {
    if (taken_) state_.busy.store(false, std::memory_order_release);
  }
  Busy(const Busy&) = delete;
  Busy& operator=(const Busy&) = delete;

  bool taken() const {
    return taken_;
  }

 private:
  State& state_;
  const bool taken_;
};

}  // namespace

int num_threads() {
  return state().threads.load(std::memory_order_relaxed);
}

void set_num_threads(int count) {
  if (count < 1 || count > kMaxThreads) {
    throw std::invalid_argument("num_threads must be between 1 and 1024, got " + std::to_string(count));
  }
  State& s = state();
  s.threads.store(count, std::memory_order_relaxed);  // the next job of the pool sees it
}

int num_awake_threads() {
  State& s = state();
  const Busy busy(s);  // or another caller might replace the pool
  return busy.taken() && s.pool && s.pool->threads() == num_threads() ? s.pool->awake() : 1;
}

void detail::run(int64_t items, const void* context, Job job) {
  if (items <= 0) return;
  State& s = state();
  if (items > 1 && num_threads() > 1) {
    const Busy busy(s);
    if (busy.taken()) {
      const int threads = num_threads();
      if (s.pool && s.pool->threads() != threads) s.pool.reset();
      if (!s.pool && threads > 1) s.pool = std::make_unique<Pool>(threads);
      if (s.pool) return s.pool->run(items, context, job);
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
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(buffer.data, bytes);
  __asan_poison_memory_region(static_cast<char*>(buffer.data) + bytes, buffer.size - bytes);
#endif
  return buffer.data;
}

}  // namespace fastinfer::cpu
