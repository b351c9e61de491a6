// Compiled without sanitizers' instrumentation: it tells them about fibers itself.
#include "fiber.h"

#include <sys/mman.h>

#include <array>
#include <stdexcept>
#include <vector>

#if defined(EMULATION_ADDRESS)
#include <sanitizer/asan_interface.h>  // its macros do nothing in a file without instrumentation, its functions do
#include <sanitizer/common_interface_defs.h>
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

Fiber host_fiber() {
  Fiber host;
#if defined(EMULATION_THREAD)
  host.thread = __tsan_get_current_fiber();
#endif
  return host;
}

Fiber pooled_fiber(size_t set, size_t i) {
  static std::array<std::vector<Fiber>, 3> pools;
  std::vector<Fiber>& pool = pools.at(set);
  while (pool.size() <= i) {
    Fiber fiber;
    fiber.stack =
        mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (fiber.stack == MAP_FAILED) throw std::runtime_error("emulation: no memory for stacks");
#if defined(EMULATION_THREAD)
    fiber.thread = __tsan_create_fiber(0);
#endif
    pool.push_back(fiber);
  }
  return pool[i];
}

void prepare(Fiber& fiber, void (*entry)()) {
  char* const stack = static_cast<char*>(fiber.stack);
#if defined(EMULATION_ADDRESS)
  // Below the place that it left at, its functions have returned and left nothing poisoned.
  char* const left = fiber.stack_pointer ? static_cast<char*>(fiber.stack_pointer) : stack;
  __asan_unpoison_memory_region(left, stack + kStackBytes - left);
  fiber.fake_stack = nullptr;
  fiber.bottom = stack;
  fiber.size = kStackBytes;
#endif
  void** top = reinterpret_cast<void**>(stack + kStackBytes - 64);
  *--top = nullptr;  // the return address of entry, which keeps its stack 16-byte aligned
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  fiber.stack_pointer = top;
}

void enter(Fiber& host, Fiber& fiber) {
#if defined(EMULATION_ADDRESS)
  __sanitizer_start_switch_fiber(&host.fake_stack, fiber.bottom, fiber.size);
#elif defined(EMULATION_THREAD)
  __tsan_switch_to_fiber(fiber.thread, __tsan_switch_to_fiber_no_sync);
#endif
  emulation_switch(&host.stack_pointer, fiber.stack_pointer);
#if defined(EMULATION_ADDRESS)
  __sanitizer_finish_switch_fiber(host.fake_stack, nullptr, nullptr);
#endif
}

void leave(Fiber& fiber, Fiber& host) {
#if defined(EMULATION_ADDRESS)
  __sanitizer_start_switch_fiber(&fiber.fake_stack, host.bottom, host.size);
#elif defined(EMULATION_THREAD)
  __tsan_switch_to_fiber(host.thread, __tsan_switch_to_fiber_no_sync);
#endif
  emulation_switch(&fiber.stack_pointer, host.stack_pointer);
}

void arrive([[maybe_unused]] Fiber& fiber, [[maybe_unused]] Fiber& host) {
#if defined(EMULATION_ADDRESS)
  __sanitizer_finish_switch_fiber(fiber.fake_stack, &host.bottom, &host.size);
#endif
}

void pass_on([[maybe_unused]] Fiber& running, [[maybe_unused]] void* from, [[maybe_unused]] void* to) {
#if defined(EMULATION_THREAD)
  static void* const helper = __tsan_create_fiber(0);
  __tsan_switch_to_fiber(helper, __tsan_switch_to_fiber_no_sync);
  __tsan_acquire(from);
  __tsan_release(to);
  __tsan_switch_to_fiber(running.thread, __tsan_switch_to_fiber_no_sync);
#endif
}

}  // namespace emulation
