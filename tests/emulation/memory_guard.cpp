#include "memory_guard.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(EMULATION_ADDRESS)
#include <sanitizer/asan_interface.h>
#endif

namespace emulation {
namespace {

std::vector<const void*> constants;

}  // namespace

#if defined(EMULATION_ADDRESS)

namespace {

constexpr uintptr_t kAlignment = 64;  // of torch's tensors; other objects, to which old bytes may point, rarely have it

bool holds(const void* begin, size_t bytes, const void* address) {
  return reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(begin) < bytes;
}

}  // namespace

// Whatever bytes of the arguments are an address in allocated memory count as a pointer.
void MemoryGuard::close(const Launch& launch) {
  for (size_t at = 0; at + sizeof(void*) <= launch.argument_bytes; at += sizeof(void*)) {
    void* pointer = nullptr;
    std::memcpy(&pointer, static_cast<const char*>(launch.arguments) + at, sizeof pointer);
    const auto in = [&](const Block& block) { return holds(block.begin, block.bytes, pointer); };
    if (pointer == nullptr || std::any_of(closed_.begin(), closed_.end(), in)) continue;
    Block block{};
    char name[1];
    if (std::strcmp(__asan_locate_address(pointer, name, sizeof name, &block.begin, &block.bytes), "heap") != 0)
      continue;
    if (!in(block) || reinterpret_cast<uintptr_t>(block.begin) % kAlignment != 0) continue;
    const auto has = [&](const void* address) { return holds(block.begin, block.bytes, address); };
    if (std::any_of(constants.begin(), constants.end(), has)) continue;
    if (__asan_region_is_poisoned(block.begin, block.bytes) != nullptr) continue;  // freed
    __asan_poison_memory_region(block.begin, block.bytes);
    closed_.push_back(block);
  }
}

void MemoryGuard::open() {
  for (const Block& block : closed_) __asan_unpoison_memory_region(block.begin, block.bytes);
  closed_.clear();
}

#else

void MemoryGuard::close(const Launch& /*launch*/) {}

void MemoryGuard::open() {}

#endif

}  // namespace emulation

void emulation_set_constant_memory(const void* const* addresses, size_t count) {
  emulation::constants.assign(addresses, addresses + count);
}
