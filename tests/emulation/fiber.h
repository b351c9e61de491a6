// Stacks that the host's thread switches between, and what sanitizers must be told of it.
#pragma once

#include <cstddef>

#if defined(EMULATION_THREAD)
#include <sanitizer/tsan_interface.h>
#endif

namespace emulation {

struct Fiber {
  void* stack_pointer = nullptr;
  void* stack = nullptr;  // lowest address; null for the host's own
#if defined(EMULATION_ADDRESS)
  void* fake_stack = nullptr;
  const void* bottom = nullptr;
  size_t size = 0;
#elif defined(EMULATION_THREAD)
  void* thread = nullptr;
#endif
};

inline constexpr size_t kStackBytes = 256 * 1024;

Fiber host_fiber();
// The i-th of a set, kept from launch to launch: making ThreadSanitizer's threads takes a second.
Fiber pooled_fiber(size_t set, size_t i);

void prepare(Fiber& fiber, void (*entry)());  // entry calls arrive first, and leave at its end
void enter(Fiber& host, Fiber& fiber);        // returns when the fiber leaves
void leave(Fiber& fiber, Fiber& host);        // after it, in a fiber that is entered again, comes arrive
void arrive(Fiber& fiber, Fiber& host);

// What came before a release comes before what follows an acquire of the same token.
inline void release([[maybe_unused]] void* token) {
#if defined(EMULATION_THREAD)
  __tsan_release(token);
#endif
}
inline void acquire([[maybe_unused]] void* token) {
#if defined(EMULATION_THREAD)
  __tsan_acquire(token);
#endif
}

// Makes what was released to `from`, now and at earlier calls, visible to who acquires `to`, without the running
// fiber's own accesses.
void pass_on(Fiber& running, void* from, void* to);

}  // namespace emulation
