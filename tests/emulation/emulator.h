// CUDA blocks on one host thread: their threads are fibers, and two blocks of a launch run at a time, by turns. Built
// to find mistakes, not to be fast: a wrong barrier is an error, shared memory starts as NaN, asynchronous copies
// arrive as late as they may, blocks come in any order, and under ThreadSanitizer only barriers and fences order memory
// accesses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <source_location>
#include <vector>

namespace emulation {

using Site = std::source_location;  // the place where a thread waits: errors name it, and it distinguishes barriers

struct Index {
  unsigned x, y, z;
};

// The running thread's indices, by their CUDA names.
extern Index thread_index, block_index, block_size, grid_size;

struct Launch {
  const char* name;
  unsigned grid_x, grid_y, threads;
  size_t shared_bytes;
  bool dependent;  // may start before the kernel before it has ended
  const void* arguments;
  size_t argument_bytes;
  void (*body)(const void* closure);
  const void* closure;
};

// Runs every block, now or with the held launches (streams.h), for which `owner` keeps arguments and closure. Throws
// std::runtime_error with the kernel's name where one deadlocks, diverges or traps.
void run(const Launch& launch, const std::shared_ptr<const void>& owner);

// ---- called by a kernel's threads ----

void* dynamic_shared();
void block_barrier(int id, int threads, Site site);  // id 0: all of the block; 1 .. 15: `threads` of it
int block_vote(bool value, Site site);               // a barrier of the block; returns how many threads said yes
void warp_barrier(uint32_t mask, Site site);
[[noreturn]] void trap(const char* what, Site site);

// In a dependent launch memory that the kernel's arguments point to is closed until then (memory_guard.h).
void grid_dependency_wait(Site site);

// A thread that waits for another stream's kernel lets all others run, and time pass: a microsecond each time.
void yield();
uint64_t nanoseconds();

// Memory is ordered between blocks by a fence, an atomic operation after it, another block's atomic operation, and that
// block's fence after it.
void fence();
void atomic_operation(const void* p);  // comes before one

// Operations that a warp's lanes do together. They wait for every lane of `mask` (mma and load_matrix: all 32) at the
// same place, and order no memory.
uint64_t shuffle(uint32_t mask, uint64_t value, int source, Site site);  // returns all ones for a lane outside the mask
uint32_t vote(uint32_t mask, bool value, Site site);
void load_matrix(uint32_t* r, const uint16_t (&row)[8], int matrices, bool transposed, Site site);

enum class Element { kHalf, kBFloat16, kTf32, kInt8 };
// m16n8k16, for tf32 m16n8k8, for int8 m16n8k32: d[4] (float, for int8 int32_t) += a[4] b[2].
void mma(Element element, void* d, const uint32_t* a, const uint32_t* b, Site site);

// The base of all collectives: the last lane to arrive calls complete(ops, mask), where ops[lane] is what that lane
// passed.
void collective(uint32_t mask, void* op, void (*complete)(void* const (&ops)[32], uint32_t mask), Site site);

// Asynchronous copies of the running thread, in its groups.
struct Copy {
  void* to;
  unsigned char data[16];
  size_t bytes;
};
void enqueue(const Copy& copy);
void commit_copies();
std::vector<Copy> arrived_copies(size_t pending);  // removes and returns those of all groups but the last `pending`

// Products of a warpgroup (products.h): `add_half` adds the running thread's part over half of the inputs to its sums.
struct Product {
  unsigned thread = 0;
  uint32_t a_quad[4][4] = {};  // or a in registers: those of the four lanes that hold the same rows
  uint64_t a = 0, b = 0;       // matrices in shared memory
  void (*add_half)(const Product& product, void* sums, int half) = nullptr;
};
void share_in_quad(const uint32_t (&own)[4], uint32_t (&all)[4][4], Site site);  // a collective
void fence_products();
void issue(Product product, void* d, size_t bytes, bool adds, Site site);
void commit_products();
void wait_for_products(size_t pending);

// Copies that have arrived must be followed by this before a barrier, if a product comes after the barrier.
void fence_async_shared();

}  // namespace emulation
