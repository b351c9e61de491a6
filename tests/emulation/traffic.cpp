// The accesses of a warp's lanes that were made at the same place, the n-th of each lane together, are one request.
// Shared memory serves it in passes: 4-byte accesses of all lanes at once, 8-byte ones by half warps, 16-byte ones by
// quarters, and a pass takes as long as the busiest of its 32 banks has different words to give (atomics: as it has
// lanes). Global memory moves sectors of 32 bytes. (Both after NVIDIA's "CUDA C++ Best Practices Guide", sections on
// device and shared memory.)
//
// The accesses are those of the source, compiled without optimisation: nvcc may join neighbouring ones and
// drop repeated ones, so the counts of scalar code are an upper bound. Those of vectors and of the PTX wrappers, on
// which the speed depends, are the hardware's own.
#include "traffic.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

namespace emulation::traffic {
namespace {

constexpr size_t kWarp = 32, kBankBytes = 4, kBanks = 32, kPassBytes = kBanks * kBankBytes, kSectorBytes = 32;

enum class Kind { kLoad, kStore, kAtomic };

// Return addresses, the innermost first: a wrapper's accesses count where it is called.
using Place = std::array<uintptr_t, 6>;

// A place's accesses of one kind.
using Site = std::tuple<Place, bool, Kind, size_t>;  // shared, bytes

struct Lane {
  size_t lane;
  uintptr_t address;
};

struct Cost {
  int64_t requests = 0;
  int64_t units = 0;  // passes or sectors
  int64_t least = 0;  // the least units for the same bytes
};

std::map<std::string, std::map<Site, Cost>> costs;  // costs by kernel
std::string kernel;
Memory shared_memory, stack;
std::vector<std::map<Site, std::vector<uintptr_t>>> threads;  // addresses in the order of a thread's accesses
std::map<Site, std::vector<uintptr_t>>* running = nullptr;

// The library's begin and end, by the linker.
extern "C" __attribute__((visibility("hidden"))) const char __ehdr_start, _end;

// Constants of the code, which a GPU has in its instructions.
bool is_constant(uintptr_t address) {
  return address >= reinterpret_cast<uintptr_t>(&__ehdr_start) && address < reinterpret_cast<uintptr_t>(&_end);
}

bool contains(Memory memory, uintptr_t address) {
  return address - reinterpret_cast<uintptr_t>(memory.begin) < memory.bytes;
}

int64_t different(const std::vector<Lane>& lanes, size_t bytes, size_t unit) {
  std::set<uintptr_t> all;
  for (const Lane& lane : lanes) {
    for (uintptr_t i = lane.address / unit; i <= (lane.address + bytes - 1) / unit; ++i) all.insert(i);
  }
  return static_cast<int64_t>(all.size());
}

int64_t passes(const std::vector<Lane>& lanes, size_t bytes, Kind kind) {
  const size_t together = kPassBytes / std::max(bytes, kBankBytes);
  int64_t total = 0;
  for (size_t first = 0; first < kWarp; first += together) {
    std::array<std::multiset<uintptr_t>, kBanks> words;
    for (const Lane& lane : lanes) {
      if (lane.lane < first || lane.lane >= first + together) continue;
      for (uintptr_t word = lane.address / kBankBytes; word <= (lane.address + bytes - 1) / kBankBytes; ++word) {
        auto& bank = words[word % kBanks];
        if (kind == Kind::kAtomic || !bank.contains(word)) bank.insert(word);
      }
    }
    size_t busiest = 0;
    for (const auto& bank : words) busiest = std::max(busiest, bank.size());
    total += static_cast<int64_t>(busiest);
  }
  return total;
}

void add_request(Cost& cost, const Site& site, const std::vector<Lane>& lanes) {
  const auto [place, shared, kind, bytes] = site;
  const auto up = [](int64_t count, size_t unit) {
    return (count + static_cast<int64_t>(unit) - 1) / static_cast<int64_t>(unit);
  };
  ++cost.requests;
  cost.units += shared ? passes(lanes, bytes, kind) : different(lanes, bytes, kSectorBytes);
  cost.least += shared ? up(different(lanes, bytes, kBankBytes), kBanks) : up(different(lanes, bytes, 1), kSectorBytes);
}

}  // namespace

void begin_block(const char* name, unsigned count, Memory shared) {
  kernel = name;
  shared_memory = shared;
  threads.assign(count, {});
}

void end_block() {
  auto& into = costs[kernel];
  for (size_t first = 0; first < threads.size(); first += kWarp) {
    std::map<Site, std::vector<std::vector<Lane>>> requests;
    for (size_t i = first; i < std::min(threads.size(), first + kWarp); ++i) {
      for (const auto& [site, addresses] : threads[i]) {
        auto& list = requests[site];
        if (list.size() < addresses.size()) list.resize(addresses.size());
        for (size_t n = 0; n < addresses.size(); ++n) list[n].push_back({i - first, addresses[n]});
      }
    }
    for (const auto& [site, list] : requests) {
      for (const auto& lanes : list) add_request(into[site], site, lanes);
    }
  }
}

void enter_thread(unsigned thread, Memory thread_stack) {
  running = &threads[thread];
  stack = thread_stack;
}

void leave_thread() {
  running = nullptr;
}

// `caller` is the instruction that made the access, `caller_frame` its function's, which
// begins with its own caller's and the address where that goes on.
void note(const volatile void* p, size_t bytes, Kind kind, const void* caller, const void* caller_frame) {
  const auto address = reinterpret_cast<uintptr_t>(p);
  if (running == nullptr || contains(stack, address) || is_constant(address)) return;
  Place place{reinterpret_cast<uintptr_t>(caller)};
  const auto* frame = static_cast<const uintptr_t*>(caller_frame);
  for (size_t i = 1; i < place.size() && contains(stack, reinterpret_cast<uintptr_t>(frame + 1)); ++i) {
    place[i] = frame[1];
    frame = reinterpret_cast<const uintptr_t*>(frame[0]);
  }
  // A struct moves in words of its alignment, of which its size tells the most: 12 bytes three times 4, 32 twice 16.
  const size_t word = std::min<size_t>(16, bytes & -bytes);
  auto& addresses = (*running)[{place, contains(shared_memory, address), kind, word}];
  for (size_t i = 0; i < bytes; i += word) addresses.push_back(address + i);
}

}  // namespace emulation::traffic

// ---- called by instrumented code, at each access: the interface of ThreadSanitizer ----

extern "C" {

#define FASTINFER_NOTE(p, bytes, kind)                                                            \
  emulation::traffic::note(p, bytes, emulation::traffic::Kind::kind, __builtin_return_address(0), \
                           *static_cast<void* const*>(__builtin_frame_address(0)))

#define FASTINFER_ACCESSES(bytes)               \
  void __tsan_read##bytes(void* p) {            \
    FASTINFER_NOTE(p, bytes, kLoad);            \
  }                                             \
  void __tsan_write##bytes(void* p) {           \
    FASTINFER_NOTE(p, bytes, kStore);           \
  }                                             \
  void __tsan_unaligned_read##bytes(void* p) {  \
    FASTINFER_NOTE(p, bytes, kLoad);            \
  }                                             \
  void __tsan_unaligned_write##bytes(void* p) { \
    FASTINFER_NOTE(p, bytes, kStore);           \
  }

FASTINFER_ACCESSES(1)
FASTINFER_ACCESSES(2)
FASTINFER_ACCESSES(4)
FASTINFER_ACCESSES(8)
FASTINFER_ACCESSES(16)

void __tsan_read_range(void* p, unsigned long bytes) {
  FASTINFER_NOTE(p, bytes, kLoad);
}
void __tsan_write_range(void* p, unsigned long bytes) {
  FASTINFER_NOTE(p, bytes, kStore);
}

#define FASTINFER_READ_MODIFY_WRITE(bits, T, name)              \
  T __tsan_atomic##bits##_##name(volatile T* p, T value, int) { \
    FASTINFER_NOTE(p, sizeof(T), kAtomic);                      \
    return __atomic_##name(p, value, __ATOMIC_SEQ_CST);         \
  }

#define FASTINFER_ATOMICS(bits, T)                                                                     \
  T __tsan_atomic##bits##_load(const volatile T* p, int) {                                             \
    FASTINFER_NOTE(p, sizeof(T), kLoad);                                                               \
    return __atomic_load_n(p, __ATOMIC_SEQ_CST);                                                       \
  }                                                                                                    \
  void __tsan_atomic##bits##_store(volatile T* p, T value, int) {                                      \
    FASTINFER_NOTE(p, sizeof(T), kStore);                                                              \
    __atomic_store_n(p, value, __ATOMIC_SEQ_CST);                                                      \
  }                                                                                                    \
  T __tsan_atomic##bits##_exchange(volatile T* p, T value, int) {                                      \
    FASTINFER_NOTE(p, sizeof(T), kAtomic);                                                             \
    return __atomic_exchange_n(p, value, __ATOMIC_SEQ_CST);                                            \
  }                                                                                                    \
  int __tsan_atomic##bits##_compare_exchange_strong(volatile T* p, T* expected, T value, int, int) {   \
    FASTINFER_NOTE(p, sizeof(T), kAtomic);                                                             \
    return __atomic_compare_exchange_n(p, expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); \
  }                                                                                                    \
  FASTINFER_READ_MODIFY_WRITE(bits, T, fetch_add)                                                      \
  FASTINFER_READ_MODIFY_WRITE(bits, T, fetch_or)

FASTINFER_ATOMICS(8, char)
FASTINFER_ATOMICS(32, int)
FASTINFER_ATOMICS(64, long)

void __tsan_atomic_thread_fence(int) {}
void __tsan_init() {}
void __tsan_vptr_read(void**) {}
void __tsan_vptr_update(void**, void*) {}

// ---- called by traffic.py ----

// Returns the counts since the last call, a line per kernel and site: kernel, shared, kind, bytes, requests, units,
// least, and the addresses within the library.
__attribute__((visibility("default"))) const char* emulation_traffic() {
  using emulation::traffic::costs;
  static std::string text;
  Dl_info library{};
  dladdr(reinterpret_cast<const void*>(&emulation_traffic), &library);
  const auto base = reinterpret_cast<uintptr_t>(library.dli_fbase);
  std::ostringstream lines;
  for (const auto& [kernel, sites] : costs) {
    for (const auto& [site, cost] : sites) {
      const auto& [place, shared, kind, bytes] = site;
      lines << kernel << ' ' << shared << ' ' << static_cast<int>(kind) << ' ' << bytes << ' ' << cost.requests << ' '
            << cost.units << ' ' << cost.least;
      for (const uintptr_t address : place) {
        if (address != 0) lines << ' ' << address - base - 1;  // the call, not what follows it
      }
      lines << '\n';
    }
  }
  costs.clear();
  text = lines.str();
  return text.c_str();
}

}  // extern "C"
