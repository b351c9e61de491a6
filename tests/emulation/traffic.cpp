// The accesses of a warp's lanes that were made at the same place, the n-th of each lane together, are one request.
// Shared memory serves it in passes: 4-byte accesses of all lanes at once, 8-byte ones by half warps, 16-byte ones by
// quarters, and a pass takes as long as the busiest of its 32 banks has different words to give. Global memory moves
// sectors of 32 bytes. (Both after NVIDIA's "CUDA C++ Best Practices Guide", sections on device and shared memory.)
//
// Which accesses there are is what the source says, as g++ compiles it without optimisation: nvcc may join neighbouring
// ones and drop repeated ones, so the counts of scalar code are an upper bound. Those of vectors and of the PTX wrappers,
// on which the speed depends, are the hardware's own.
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

// Return addresses, the innermost first: a wrapper's accesses count where it is called.
using Place = std::array<uintptr_t, 6>;

// A place's accesses of one kind.
using Site = std::tuple<Place, bool, bool, size_t>;  // shared, store, bytes

struct Cost {
  int64_t requests = 0;
  int64_t units = 0;  // passes or sectors
  int64_t least = 0;  // that the same bytes need
};

std::map<std::string, std::map<Site, Cost>> costs;  // by kernel
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

int64_t pieces(const uintptr_t* at, size_t count, size_t bytes, size_t unit) {
  std::set<uintptr_t> all;
  for (size_t i = 0; i < count; ++i) {
    for (uintptr_t piece = at[i] / unit; piece <= (at[i] + bytes - 1) / unit; ++piece) all.insert(piece);
  }
  return static_cast<int64_t>(all.size());
}

int64_t passes(const std::vector<uintptr_t>& lanes, size_t bytes) {
  const size_t together = std::max<size_t>(1, kPassBytes / std::max(bytes, kBankBytes));
  int64_t total = 0;
  for (size_t first = 0; first < lanes.size(); first += together) {
    std::array<std::set<uintptr_t>, kBanks> words;
    for (size_t i = first; i < std::min(lanes.size(), first + together); ++i) {
      for (uintptr_t word = lanes[i] / kBankBytes; word <= (lanes[i] + bytes - 1) / kBankBytes; ++word) {
        words[word % kBanks].insert(word);
      }
    }
    size_t busiest = 0;
    for (const auto& bank : words) busiest = std::max(busiest, bank.size());
    total += static_cast<int64_t>(busiest);
  }
  return total;
}

void add_request(Cost& cost, const Site& site, const std::vector<uintptr_t>& lanes) {
  const auto [place, shared, store, bytes] = site;
  const auto of = [](int64_t count, size_t unit, size_t of) {
    return (count * static_cast<int64_t>(unit) + static_cast<int64_t>(of) - 1) / static_cast<int64_t>(of);
  };
  ++cost.requests;
  cost.units += shared ? passes(lanes, bytes) : pieces(lanes.data(), lanes.size(), bytes, kSectorBytes);
  cost.least += shared ? of(pieces(lanes.data(), lanes.size(), bytes, kBankBytes), kBankBytes, kPassBytes)
                       : of(pieces(lanes.data(), lanes.size(), bytes, 1), 1, kSectorBytes);
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
    std::map<Site, std::vector<std::vector<uintptr_t>>> requests;
    for (size_t i = first; i < std::min(threads.size(), first + kWarp); ++i) {
      for (const auto& [site, addresses] : threads[i]) {
        auto& list = requests[site];
        if (list.size() < addresses.size()) list.resize(addresses.size());
        for (size_t n = 0; n < addresses.size(); ++n) list[n].push_back(addresses[n]);
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

// `frame` is the caller's frame: its own caller's, and the address that it returns to.
void note(uintptr_t address, size_t bytes, bool store, uintptr_t caller, const uintptr_t* frame) {
  if (running == nullptr || contains(stack, address) || is_constant(address)) return;
  Place place{caller};
  for (size_t i = 1; i < place.size() && contains(stack, reinterpret_cast<uintptr_t>(frame + 1)); ++i) {
    place[i] = frame[1];
    frame = reinterpret_cast<const uintptr_t*>(frame[0]);
  }
  (*running)[{place, contains(shared_memory, address), store, bytes}].push_back(address);
}

}  // namespace emulation::traffic

// ---- called by instrumented code, at each access (-fsanitize=kernel-address names them) ----

extern "C" {

#define FASTINFER_NOTE(address, bytes, store)                                            \
  const auto* const own = static_cast<const uintptr_t*>(__builtin_frame_address(0));     \
  emulation::traffic::note(reinterpret_cast<uintptr_t>(address), bytes, store, own[1],   \
                           reinterpret_cast<const uintptr_t*>(own[0]))

#define FASTINFER_HOOKS(bytes)                       \
  void __asan_load##bytes##_noabort(const void* p) { \
    FASTINFER_NOTE(p, bytes, false);                 \
  }                                                  \
  void __asan_store##bytes##_noabort(void* p) {      \
    FASTINFER_NOTE(p, bytes, true);                  \
  }

FASTINFER_HOOKS(1)
FASTINFER_HOOKS(2)
FASTINFER_HOOKS(4)
FASTINFER_HOOKS(8)
FASTINFER_HOOKS(16)

void __asan_loadN_noabort(const void* p, size_t bytes) {
  FASTINFER_NOTE(p, bytes, false);
}
void __asan_storeN_noabort(void* p, size_t bytes) {
  FASTINFER_NOTE(p, bytes, true);
}
void __asan_handle_no_return() {}
void __asan_before_dynamic_init(const char*) {}
void __asan_after_dynamic_init() {}

// ---- called by traffic.py ----

// What was counted since the last call, a line per kernel and site: kernel, shared, store, bytes, requests, units,
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
      const auto& [place, shared, store, bytes] = site;
      lines << kernel << ' ' << shared << ' ' << store << ' ' << bytes << ' ' << cost.requests << ' ' << cost.units
            << ' ' << cost.least;
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
