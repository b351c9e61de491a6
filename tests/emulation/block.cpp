// Compiled without sanitizers' instrumentation: it tells them about barriers itself.
#include "block.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <stdexcept>

#if defined(EMULATION_ADDRESS)
#include <sanitizer/asan_interface.h>  // its macros do nothing in a file without instrumentation, its functions do
#elif defined(EMULATION_TRAFFIC)
#include "traffic.h"
#endif

namespace emulation {
namespace {

constexpr size_t kPage = 4096;
constexpr unsigned kWarp = 32;
constexpr int kPoison = 0xff;  // NaN as fp32, fp16, bf16 and fp8

// ThreadSanitizer's name for one meeting of threads. A new one each time: a thread that is slow to leave must not learn
// of what the others did since.
void* new_token() {
  static char tokens[4096];
  static size_t next = 0;
  return &tokens[next++ % sizeof tokens];
}

bool same(const Site& a, const Site& b) {
  if (a.line() != b.line() || a.column() != b.column()) return false;
  // One file's name is one string, almost always; strcmp under ThreadSanitizer took a third of all time.
  return a.file_name() == b.file_name() || std::strcmp(a.file_name(), b.file_name()) == 0;
}

}  // namespace

Block* Block::current_ = nullptr;

std::string describe(Site site) {
  const char* file = std::strrchr(site.file_name(), '/');
  return std::string(file != nullptr ? file + 1 : site.file_name()) + ":" + std::to_string(site.line());
}

Block::Block(LaunchState& state, size_t set, size_t first)
    : state_(state),
      launch_(state.launch),
      threads_(state.launch.threads),
      meetings_((state.launch.threads + kWarp - 1) / kWarp),
      host_(host_fiber()) {
  shared_ = static_cast<unsigned char*>(std::aligned_alloc(kPage, shared_capacity()));
  for (unsigned i = 0; i < launch_.threads; ++i) {
    threads_[i].index = i;
    threads_[i].fiber = pooled_fiber(set, first + i);
  }
}

Block::~Block() {
#if defined(EMULATION_ADDRESS)
  __asan_unpoison_memory_region(shared_, shared_capacity());
#endif
  std::free(shared_);
}

// ---- on the host ----

void Block::start(Index index) {
  index_ = index;
  running_ = true;
  waited_ = !launch_.dependent;
  poison_shared();
  barriers_.assign(16, {});
  for (std::vector<Meeting>& meetings : meetings_) meetings.clear();
  unfenced_ = 0;
  for (Thread& thread : threads_) {
    thread.state = State::kReady;
    thread.copies.clear();
    thread.groups.clear();
    thread.products = {};
    thread.copied = thread.published = false;
    prepare(thread.fiber, &Block::entry);
  }
#if defined(EMULATION_TRAFFIC)
  traffic::begin_block(launch_.name, launch_.threads, {shared_, launch_.shared_bytes});
#endif
}

bool Block::step() {
  bool progress = false, done = true;
  for (size_t first = 0; first < threads_.size(); first += kWarp) {
    const size_t last = std::min(first + kWarp, threads_.size());
    for (size_t i = first; i < last; ++i) {
      if (threads_[i].state == State::kYielded) threads_[i].state = State::kReady;
    }
    for (bool moved = true; moved;) {  // a warp runs until all its lanes wait for other warps
      moved = false;
      for (size_t i = first; i < last; ++i) {
        if (threads_[i].state != State::kReady) continue;
        moved = progress = true;
        resume(threads_[i]);
      }
    }
    for (size_t i = first; i < last; ++i) done = done && threads_[i].state == State::kDone;
  }
  if (done) finish();
  return progress;
}

void Block::finish() {
  running_ = false;
  acquire(&end_token_);  // frees what the fibers allocated
#if defined(EMULATION_TRAFFIC)
  traffic::end_block();
#endif
  if (!waited_) error("launched as dependent, but a block ends without grid_dependency_wait");
}

bool Block::resume_dependents() {
  bool any = false;
  for (Thread& thread : threads_) {
    if (thread.state != State::kDependency) continue;
    thread.state = State::kReady;
    any = true;
  }
  return any;
}

std::string Block::deadlock() const {
  std::ostringstream message;
  message << "deadlock in block (" << index_.x << ", " << index_.y << "):";
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

void Block::resume(Thread& thread) {
  current_ = this;
  thread_ = &thread;
  thread_index = {thread.index, 0, 0};
  block_index = index_;
  block_size = {launch_.threads, 1, 1};
  grid_size = {launch_.grid_x, launch_.grid_y, 1};
#if defined(EMULATION_TRAFFIC)
  traffic::enter_thread(thread.index, {thread.fiber.stack, kStackBytes});
#endif
  enter(host_, thread.fiber);
#if defined(EMULATION_TRAFFIC)
  traffic::leave_thread();
#endif
  if (error_.empty()) return;
  acquire(&error_);
  error(error_);
}

void Block::error(const std::string& message) const {
  throw std::runtime_error(std::string(launch_.name) + ": " + message);
}

size_t Block::shared_capacity() const {
  return launch_.shared_bytes / kPage * kPage + kPage;
}

void Block::poison_shared() {
#if defined(EMULATION_ADDRESS)
  __asan_unpoison_memory_region(shared_, shared_capacity());
#elif defined(EMULATION_THREAD)
  // Each block has a shared memory of its own: forget the accesses of the block before. The unmapping does that, and
  // the system call behind ThreadSanitizer's back brings the memory back.
  munmap(shared_, shared_capacity());
  syscall(SYS_mmap, shared_, shared_capacity(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
#endif
  // Not memset, in which ThreadSanitizer would see a write that races with the threads' own.
  void* to = shared_;
  size_t count = shared_capacity();
  asm volatile("rep stosb" : "+D"(to), "+c"(count) : "a"(kPoison) : "memory");
#if defined(EMULATION_ADDRESS)
  __asan_poison_memory_region(shared_ + launch_.shared_bytes, shared_capacity() - launch_.shared_bytes);
#endif
}

// ---- on a fiber ----

void Block::entry() {
  Block& block = current();
  arrive(block.thread_->fiber, block.host_);
  acquire(&block.state_.start_token);
  block.launch_.body(block.launch_.closure);
  release(&block.end_token_);
  block.thread_->state = State::kDone;
  leave(block.thread_->fiber, block.host_);
  std::abort();  // a thread that has ended is not resumed
}

void Block::wait(State state, Site site) {
  thread_->state = state;
  thread_->site = site;
  leave(thread_->fiber, host_);
  arrive(thread_->fiber, host_);
}

int Block::barrier(int id, int count, bool vote, Site site) {
  Barrier& barrier = barriers_.at(static_cast<size_t>(id));
  Thread& self = *thread_;
  const int expected = id == 0 ? static_cast<int>(threads_.size()) : count;
  if (barrier.arrived == 0) {
    barrier.expected = expected;
    barrier.votes = 0;
    barrier.site = site;
    barrier.token = new_token();
  } else if (barrier.expected != expected || !same(barrier.site, site)) {
    fail("divergent barrier: thread " + std::to_string(self.index) + " arrives at " + describe(site) +
         " while others wait at " + describe(barrier.site));
  }
  void* const token = barrier.token;
  release(token);
  barrier.votes += vote ? 1 : 0;
  if (++barrier.arrived == barrier.expected) {
    barrier.arrived = 0;
    self.votes = barrier.votes;
    publish_copies(self);
    for (Thread& thread : threads_) {
      if (thread.state != State::kBarrier || thread.barrier != id) continue;
      publish_copies(thread);
      thread.state = State::kReady;
      thread.votes = barrier.votes;
    }
  } else {
    self.barrier = id;
    wait(State::kBarrier, site);
  }
  acquire(token);
  return self.votes;
}

void Block::collective(uint32_t mask, void* op, void (*complete)(void* const (&)[32], uint32_t), Site site,
                       bool orders) {
  const size_t warp = thread_->index / kWarp;
  const unsigned lane = thread_->index % kWarp;
  if ((mask >> lane & 1) == 0) fail("a lane is not in its own mask at " + describe(site));
  if (kWarp * warp + std::bit_width(mask) > threads_.size()) {
    fail("the mask at " + describe(site) + " names a lane that does not exist");
  }
  std::vector<Meeting>& meetings = meetings_[warp];
  auto meeting = std::find_if(meetings.begin(), meetings.end(),
                              [&](const Meeting& m) { return m.mask == mask && same(m.site, site); });
  if (meeting == meetings.end()) meeting = meetings.insert(meeting, {mask, 0, site, new_token(), {}});
  meeting->arrived |= 1u << lane;
  meeting->ops[lane] = op;
  void* const token = meeting->token;
  if (orders) release(token);
  if (meeting->arrived == mask) {
    complete(meeting->ops, mask);
    meetings.erase(meeting);
    for (unsigned other = 0; other < kWarp; ++other) {
      if (mask >> other & 1) threads_[kWarp * warp + other].state = State::kReady;
    }
  } else {
    wait(State::kCollective, site);
  }
  if (orders) acquire(token);
}

void Block::wait_for_previous(Site site) {
  waited_ = true;
  if (!state_.previous_ended) wait(State::kDependency, site);
}

void Block::yield() {
  wait(State::kYielded, Site::current());
}

void Block::fence() {
  acquire(&observed_);
  release(&fenced_);
}

// The thread has passed a barrier: products of other threads may read its copies.
void Block::publish_copies(Thread& thread) {
  if (thread.copied && !thread.published) ++unfenced_;
  thread.published = thread.published || thread.copied;
  thread.copied = false;
}

void Block::fence_async_shared() {
  if (thread_->published) --unfenced_;
  thread_->copied = thread_->published = false;
}

void Block::issue(Product product, void* d, size_t bytes, bool adds, Site site) {
  if (thread_->copied || unfenced_ > 0)
    fail("copies without fence_async_shared before the product at " + describe(site));
  product.thread = thread_->index;
  thread_->products.issue(product, d, bytes, adds, site);
}

void Block::atomic_operation(const void* p) {
  const auto offset = reinterpret_cast<uintptr_t>(p) - reinterpret_cast<uintptr_t>(shared_);
  if (offset >= launch_.shared_bytes) pass_on(thread_->fiber, &fenced_, &observed_);
}

void Block::fail(const std::string& message) {
  error_ = message;
  thread_->state = State::kDone;
  release(&error_);
  leave(thread_->fiber, host_);
  std::abort();  // never resumed
}

}  // namespace emulation
