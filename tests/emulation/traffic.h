// The cost of a kernel's memory accesses on a GPU, counted while the emulator runs it. The traffic build's kernels call
// the hooks in traffic.cpp at every access; with these functions the emulator reports everything else.
#pragma once

#include <cstddef>

namespace emulation::traffic {

struct Memory {
  const void* begin;
  size_t bytes;
};

void begin_block(const char* kernel, unsigned threads, Memory shared);
void end_block();
void enter_thread(unsigned thread, Memory stack);
void leave_thread();

}  // namespace emulation::traffic
