// Compiled without sanitizers' instrumentation: it tells them about fibers and barriers itself.
#include "emulator.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <sstream>
#include <stdexcept>
#include <string>

#if defined(EMULATION_ADDRESS)
#include <sanitizer/asan_interface.h>  // its macros do nothing in a file without instrumentation, its functions do
#include <sanitizer/common_interface_defs.h>
#elif defined(EMULATION_THREAD)
#include <sanitizer/tsan_interface.h>
#elif defined(EMULATION_TRAFFIC)
#include "traffic.h"
#endif

#if !defined(__x86_64__)
#error "the emulator switches stacks with x86-64 instructions"
#endif

// Saves the callee-saved registers and the stack pointer at *from, and continues where `to` was saved.
extern "C" void emulation_switch(void** from, void* to);
asm(R"(
.text
.globl emulation_switch
.type emulation_switch, @function
emulation_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulation_switch, .-emulation_switch
)");

namespace emulation {

Index thread_index, block_index, block_size, grid_size;

namespace {

constexpr size_t kStackBytes = 256 * 1024;
constexpr size_t kPage = 4096;
constexpr unsigned kWarp = 32;
constexpr int kPoison = 0xff;  // NaN as fp32, fp16, bf16 and fp8

// The state that sanitizers need when the stack changes.
struct Context {
  void* stack_pointer = nullptr;
  void* stack = nullptr;  // lowest address; null for the host's own
#if defined(EMULATION_ADDRESS)
  void* fake_stack = nullptr;
  const void* bottom = nullptr;
  size_t size = 0;
#elif defined(EMULATION_THREAD)
  void* fiber = nullptr;
#endif
};

enum class State { kReady, kCollective, kBarrier, kDone };

struct Thread {
  Context context;
  unsigned index = 0;
  State state = State::kDone;
  Site site;  // the place that it waits at
  int barrier = 0;
  uint32_t mask = 0;  // mask of the collective
  void* op = nullptr;
  void* token = nullptr;
  std::vector<Copy> copies;              // not committed
  std::deque<std::vector<Copy>> groups;  // committed, oldest first
};

struct Barrier {
  int arrived = 0;
  int expected = 0;
  Site site;
  void* token = nullptr;
};

// ThreadSanitizer's name for one meeting of threads. A new one each time: a thread that is slow to leave must not learn
// of what the others did since.
void* new_token() {
  static char tokens[4096];
  static size_t next = 0;
  return &tokens[next++ % sizeof tokens];
}

std::string describe(Site site) {
  const char* file = std::strrchr(site.file_name(), '/');
  return std::string(file != nullptr ? file + 1 : site.file_name()) + ":" + std::to_string(site.line());
}

// The stack of a block's i-th thread, kept from launch to launch: making ThreadSanitizer's fibers takes a second.
Context pooled_context(size_t i) {
  static std::vector<Context> pool;
  while (pool.size() <= i) {
    Context context;
    context.stack =
        mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (context.stack == MAP_FAILED) throw std::runtime_error("emulation: no memory for stacks");
#if defined(EMULATION_THREAD)
    context.fiber = __tsan_create_fiber(0);
#endif
    pool.push_back(context);
  }
  return pool[i];
}

class Block;
Block* current_block = nullptr;

// Runs the blocks of one launch on a pool of fibers.
class Block {
 public:
  explicit Block(const Launch& launch) : launch_(launch), threads_(launch.threads) {
    shared_ = static_cast<unsigned char*>(std::aligned_alloc(kPage, shared_capacity()));
    for (unsigned i = 0; i < launch.threads; ++i) {
      threads_[i].index = i;
      threads_[i].context = pooled_context(i);
    }
#if defined(EMULATION_THREAD)
    host_.fiber = __tsan_get_current_fiber();
#endif
  }

  ~Block() {
#if defined(EMULATION_ADDRESS)
    __asan_unpoison_memory_region(shared_, shared_capacity());
#endif
    std::free(shared_);
  }

  void run(unsigned x, unsigned y) {
    block_index = {x, y, 0};
    poison_shared();
    barriers_.assign(16, {});
    for (Thread& thread : threads_) start(thread);
#if defined(EMULATION_TRAFFIC)
    traffic::begin_block(launch_.name, launch_.threads, {shared_, launch_.shared_bytes});
#endif
    while (true) {
      bool progress = false, done = true;
      for (size_t first = 0; first < threads_.size(); first += kWarp) {
        const size_t last = std::min(first + kWarp, threads_.size());
        for (bool moved = true; moved;) {  // a warp runs until all its lanes wait for other warps
          moved = false;
          for (size_t i = first; i < last; ++i) {
            if (threads_[i].state != State::kReady) continue;
            moved = progress = true;
            resume(threads_[i]);
            if (!error_.empty()) acquire(&error_);
            if (!error_.empty()) throw std::runtime_error(std::string(launch_.name) + ": " + error_);
          }
        }
        for (size_t i = first; i < last; ++i) done = done && threads_[i].state == State::kDone;
      }
      if (done) break;
      if (!progress) throw std::runtime_error(std::string(launch_.name) + ": " + deadlock());
    }
    acquire(&end_token_);  // frees what the fibers allocated
#if defined(EMULATION_TRAFFIC)
    traffic::end_block();
#endif
  }

  // ---- on a fiber ----

  void barrier(int id, int count, Site site) {
    Barrier& barrier = barriers_.at(static_cast<size_t>(id));
    Thread& self = *running_;
    const int expected = id == 0 ? static_cast<int>(threads_.size()) : count;
    if (barrier.arrived == 0) {
      barrier.expected = expected;
      barrier.site = site;
      barrier.token = new_token();
    } else if (barrier.expected != expected || !same(barrier.site, site)) {
      fail("divergent barrier: thread " + std::to_string(self.index) + " arrives at " + describe(site) +
           " while others wait at " + describe(barrier.site));
    }
    void* const token = barrier.token;
    release(token);
    if (++barrier.arrived == barrier.expected) {
      barrier.arrived = 0;
      for (Thread& thread : threads_) {
        if (thread.state == State::kBarrier && thread.barrier == id) thread.state = State::kReady;
      }
    } else {
      self.barrier = id;
      wait(State::kBarrier, site);
    }
    acquire(token);
  }

  void collective(uint32_t mask, void* op, void (*complete)(void* const (&)[32], uint32_t), Site site, bool orders) {
    Thread& self = *running_;
    const size_t first = self.index / kWarp * kWarp;
    const unsigned lane = self.index % kWarp;
    if ((mask >> lane & 1) == 0) fail("a lane is not in its own mask at " + describe(site));
    self.mask = mask;
    self.op = op;
    self.site = site;
    self.state = State::kCollective;
    void* ops[32] = {};
    void* token = nullptr;
    unsigned missing = 0;
    for (unsigned other = 0; other < kWarp; ++other) {
      if ((mask >> other & 1) == 0) continue;
      if (first + other >= threads_.size()) {
        fail("the mask at " + describe(site) + " names a lane that does not exist");
      }
      const Thread& thread = threads_[first + other];
      ops[other] = thread.op;
      if (thread.state != State::kCollective || thread.mask != mask || !same(thread.site, site)) {
        ++missing;
      } else if (other != lane) {
        token = thread.token;
      }
    }
    self.token = token = token != nullptr ? token : new_token();
    if (orders) release(token);
    if (missing == 0) {
      complete(ops, mask);
      for (unsigned other = 0; other < kWarp; ++other) {
        if (mask >> other & 1) threads_[first + other].state = State::kReady;
      }
    } else {
      wait(State::kCollective, site);
    }
    if (orders) acquire(token);
  }

  [[noreturn]] void fail(const std::string& message) {
    error_ = message;
    running_->state = State::kDone;
    release(&error_);
    leave();
    std::abort();  // never resumed
  }

  Thread& running() {
    return *running_;
  }
  void* shared() {
    return shared_;
  }

 private:
  static bool same(const Site& a, const Site& b) {
    if (a.line() != b.line() || a.column() != b.column()) return false;
    // One file's name is one string, almost always; strcmp under ThreadSanitizer took a third of all time.
    return a.file_name() == b.file_name() || std::strcmp(a.file_name(), b.file_name()) == 0;
  }

  static void release([[maybe_unused]] void* token) {
#if defined(EMULATION_THREAD)
    __tsan_release(token);
#endif
  }
  static void acquire([[maybe_unused]] void* token) {
#if defined(EMULATION_THREAD)
    __tsan_acquire(token);
#endif
  }

  size_t shared_capacity() const {
    return launch_.shared_bytes / kPage * kPage + kPage;
  }

  void poison_shared() {
#if defined(EMULATION_ADDRESS)
    __asan_unpoison_memory_region(shared_, shared_capacity());
#elif defined(EMULATION_THREAD)
    // Each block has a shared memory of its own: forget the accesses of the block before. The unmapping does that, and
    // the system call behind ThreadSanitizer's back brings the memory back.
    munmap(shared_, shared_capacity());
    syscall(SYS_mmap, shared_, shared_capacity(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1,
            0);
#endif
    // Not memset, in which ThreadSanitizer would see a write that races with the threads' own.
    void* to = shared_;
    size_t count = shared_capacity();
    asm volatile("rep stosb" : "+D"(to), "+c"(count) : "a"(kPoison) : "memory");
#if defined(EMULATION_ADDRESS)
    __asan_poison_memory_region(shared_ + launch_.shared_bytes, shared_capacity() - launch_.shared_bytes);
#endif
  }

  void start(Thread& thread) {
    thread.state = State::kReady;
    thread.copies.clear();
    thread.groups.clear();
    char* const stack = static_cast<char*>(thread.context.stack);
#if defined(EMULATION_ADDRESS)
    __asan_unpoison_memory_region(stack, kStackBytes);
    thread.context.fake_stack = nullptr;
    thread.context.bottom = stack;
    thread.context.size = kStackBytes;
#endif
    void** top = reinterpret_cast<void**>(stack + kStackBytes - 64);
    *--top = nullptr;  // the return address of entry, which keeps its stack 16-byte aligned
    *--top = reinterpret_cast<void*>(&Block::entry);
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    thread.context.stack_pointer = top;
  }

  static void entry() {
    Block& block = *current_block;
    block.arrived_on_fiber();
    acquire(&block.start_token_);
    block.launch_.body(block.launch_.closure);
    release(&block.end_token_);
    block.running_->state = State::kDone;
    block.leave();
    std::abort();  // a thread that has ended is not resumed
  }

  void wait(State state, Site site) {
    running_->state = state;
    running_->site = site;
    leave();
    arrived_on_fiber();
  }

  void resume(Thread& thread) {
    running_ = &thread;
    thread_index = {thread.index, 0, 0};
#if defined(EMULATION_ADDRESS)
    __sanitizer_start_switch_fiber(&host_.fake_stack, thread.context.bottom, thread.context.size);
#elif defined(EMULATION_THREAD)
    __tsan_switch_to_fiber(thread.context.fiber, __tsan_switch_to_fiber_no_sync);
#elif defined(EMULATION_TRAFFIC)
    traffic::enter_thread(thread.index, {thread.context.stack, kStackBytes});
#endif
    emulation_switch(&host_.stack_pointer, thread.context.stack_pointer);
#if defined(EMULATION_ADDRESS)
    __sanitizer_finish_switch_fiber(host_.fake_stack, nullptr, nullptr);
#elif defined(EMULATION_TRAFFIC)
    traffic::leave_thread();
#endif
  }

  void leave() {
    Context& context = running_->context;
#if defined(EMULATION_ADDRESS)
    __sanitizer_start_switch_fiber(&context.fake_stack, host_.bottom, host_.size);
#elif defined(EMULATION_THREAD)
    __tsan_switch_to_fiber(host_.fiber, __tsan_switch_to_fiber_no_sync);
#endif
    emulation_switch(&context.stack_pointer, host_.stack_pointer);
  }

  void arrived_on_fiber() {
#if defined(EMULATION_ADDRESS)
    __sanitizer_finish_switch_fiber(running_->context.fake_stack, &host_.bottom, &host_.size);
#endif
  }

  std::string deadlock() const {
    std::ostringstream message;
    message << "deadlock in block (" << block_index.x << ", " << block_index.y << "):";
    size_t ended = 0, described = 0;
    std::string last;
    for (const Thread& thread : threads_) {
      if (thread.state == State::kDone) {
        ++ended;
        continue;
      }
      const std::string what =
          (thread.state == State::kBarrier ? "barrier at " : "warp operation at ") + describe(thread.site);
      if (what == last || ++described > 8) continue;
      message << " thread " << thread.index << " and on wait for the " << what << ";";
      last = what;
    }
    message << " " << ended << " of " << threads_.size() << " threads have ended";
    return message.str();
  }

 public:
  void release_launch() {
    release(&start_token_);
  }
  void acquire_launch() {
    acquire(&end_token_);
  }

 private:
  const Launch& launch_;
  std::vector<Thread> threads_;
  std::vector<Barrier> barriers_;
  unsigned char* shared_ = nullptr;
  Context host_;
  Thread* running_ = nullptr;
  std::string error_;
  char start_token_ = 0, end_token_ = 0;
};

}  // namespace

void run(const Launch& launch) {
  if (launch.threads == 0 || launch.threads > 1024) {
    throw std::runtime_error(std::string(launch.name) + ": a block must have 1 to 1024 threads, got " +
                             std::to_string(launch.threads));
  }
  grid_size = {launch.grid_x, launch.grid_y, 1};
  block_size = {launch.threads, 1, 1};
  Block block(launch);
  current_block = &block;
  block.release_launch();
  for (unsigned y = 0; y < launch.grid_y; ++y) {
    for (unsigned x = 0; x < launch.grid_x; ++x) block.run(x, y);
  }
  block.acquire_launch();
}

void* dynamic_shared() {
  return current_block->shared();
}

void block_barrier(int id, int threads, Site site) {
  current_block->barrier(id, threads, site);
}

void warp_barrier(uint32_t mask, Site site) {
  current_block->collective(mask, nullptr, [](void* const(&)[32], uint32_t) {}, site, true);
}

void collective(uint32_t mask, void* op, void (*complete)(void* const (&)[32], uint32_t), Site site) {
  current_block->collective(mask, op, complete, site, false);
}

void trap(const char* what, Site site) {
  current_block->fail(std::string(what) + " at " + describe(site));
}

void enqueue(const Copy& copy) {
  current_block->running().copies.push_back(copy);
}

void commit_copies() {
  Thread& thread = current_block->running();
  thread.groups.push_back(std::move(thread.copies));
  thread.copies.clear();
}

std::vector<Copy> arrived_copies(size_t pending) {
  Thread& thread = current_block->running();
  std::vector<Copy> arrived;
  for (; thread.groups.size() > pending; thread.groups.pop_front()) {
    arrived.insert(arrived.end(), thread.groups.front().begin(), thread.groups.front().end());
  }
  return arrived;
}

}  // namespace emulation
