// One block: the threads, their barriers and the operations that they do together.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "emulator.h"
#include "fiber.h"
#include "products.h"

namespace emulation {

enum class State { kReady, kYielded, kCollective, kBarrier, kDependency, kDone };

struct Thread {
  Fiber fiber;
  unsigned index = 0;
  State state = State::kDone;
  Site site;  // the place that it waits at
  int barrier = 0;
  int votes = 0;                          // of the barrier that it has passed
  std::vector<Copy> copies;               // not committed
  std::vector<std::vector<Copy>> groups;  // committed, oldest first
  Products products;
  bool copied = false;     // copies have arrived since the last barrier or fence_async_shared
  bool published = false;  // and then there was a barrier, but no such fence
};

struct Barrier {
  int arrived = 0;
  int expected = 0;
  int votes = 0;
  Site site;
  void* token = nullptr;
};

// Lanes of a warp that wait for all of `mask` at one place.
struct Meeting {
  uint32_t mask;
  uint32_t arrived;
  Site site;
  void* token;
  void* ops[32];
};

// What the blocks of a launch share.
struct LaunchState {
  const Launch& launch;
  bool previous_ended = false;  // the kernel before
  char start_token = 0;
};

class Block {
 public:
  Block(LaunchState& state, size_t set, size_t first = 0);  // the fibers that it runs on: of this set, from the first
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  ~Block();

  // ---- on the host ----

  void start(Index index);
  bool running() const {  // not all threads have ended
    return running_;
  }
  bool step();  // runs every thread until it waits or yields; returns false if none could run
  bool resume_dependents();
  std::string deadlock() const;

  // ---- on a fiber ----

  // The block whose thread runs.
  static Block& current() {
    return *current_;
  }
  Thread& thread() {
    return *thread_;
  }
  void* shared() {
    return shared_;
  }
  int barrier(int id, int count, bool vote, Site site);  // returns the votes
  void collective(uint32_t mask, void* op, void (*complete)(void* const (&)[32], uint32_t), Site site, bool orders);
  void wait_for_previous(Site site);
  void yield();
  void fence();
  void fence_async_shared();
  void issue(Product product, void* d, size_t bytes, bool adds, Site site);
  void atomic_operation(const void* p);
  [[noreturn]] void fail(const std::string& message);

 private:
  static void entry();
  size_t shared_capacity() const;
  void poison_shared();
  void finish();
  void resume(Thread& thread);
  void wait(State state, Site site);
  void publish_copies(Thread& thread);
  [[noreturn]] void error(const std::string& message) const;

  static Block* current_;
  LaunchState& state_;
  const Launch& launch_;
  Index index_{};
  std::vector<Thread> threads_;
  std::vector<Barrier> barriers_;
  std::vector<std::vector<Meeting>> meetings_;  // by warp
  unsigned char* shared_ = nullptr;
  Fiber host_;
  Thread* thread_ = nullptr;
  bool running_ = false;
  bool waited_ = false;  // for the kernel before
  std::string error_;
  unsigned unfenced_ = 0;  // threads that have published copies without fence_async_shared
  char end_token_ = 0, fenced_ = 0, observed_ = 0;
};

std::string describe(Site site);

}  // namespace emulation
