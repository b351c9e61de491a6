// Closes the memory that a kernel's arguments point to, until its grid_dependency_wait: in the build with
// AddressSanitizer any access before is an error. Whatever the memory was last written by, it may be the result of the
// kernel before, which has not ended.
#pragma once

#include <cstddef>
#include <vector>

#include "emulator.h"

namespace emulation {

class MemoryGuard {
 public:
  MemoryGuard() = default;
  MemoryGuard(const MemoryGuard&) = delete;
  MemoryGuard& operator=(const MemoryGuard&) = delete;
  ~MemoryGuard() {
    open();
  }
  void close(const Launch& launch);
  void open();

 private:
  struct Block {
    void* begin;
    size_t bytes;
  };
  std::vector<Block> closed_;
};

}  // namespace emulation

// Memory that stays open, by any address in each allocation: a caller's promise that no kernel writes it. Replaces
// those of the call before.
extern "C" __attribute__((visibility("default"))) void emulation_set_constant_memory(const void* const* addresses,
                                                                                     size_t count);
