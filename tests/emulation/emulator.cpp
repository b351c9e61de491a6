#include "emulator.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "block.h"
#include "block_order.h"
#include "common/dependent_launches.h"
#include "memory_guard.h"
#include "streams.h"

namespace emulation {

Index thread_index, block_index, block_size, grid_size;

namespace {

uint64_t yields = 0;

std::string launches;  // see emulation_launches
bool launches_wanted = false;

// Blocks that run at a time, by turns. The build that counts accesses counts one block's after the other's.
#if defined(EMULATION_TRAFFIC)
constexpr size_t kResident = 1;
#else
constexpr size_t kResident = 2;
#endif

}  // namespace

// The names of the launches since the last call, one a line; nothing is noted before the first call.
extern "C" __attribute__((visibility("default"))) const char* emulation_launches() {
  static std::string taken;
  taken = std::exchange(launches, std::string());
  launches_wanted = true;
  return taken.c_str();
}

void run(const Launch& asked, const std::shared_ptr<const void>& owner) {
  Launch launch = asked;
  launch.dependent = launch.dependent && fastinfer::dependent_launches();
  if (launches_wanted) launches += std::string(launch.name) + "\n";
  if (launch.threads == 0 || launch.threads > 1024) {
    throw std::runtime_error(std::string(launch.name) + ": a block must have 1 to 1024 threads, got " +
                             std::to_string(launch.threads));
  }
  if (hold(launch, owner)) return;
  LaunchState state{.launch = launch, .previous_ended = !launch.dependent};
  release(&state.start_token);
  const std::vector<uint32_t> order = block_order(launch.grid_x * launch.grid_y);
  auto next = order.begin();
  std::vector<std::unique_ptr<Block>> resident;
  for (size_t i = 0; i < std::min(kResident, order.size()); ++i) resident.push_back(std::make_unique<Block>(state, i));
  MemoryGuard guard;
  if (launch.dependent) guard.close(launch);

  while (true) {
    bool progress = false;
    const Block* waiting = nullptr;
    for (const auto& block : resident) {
      if (!block->running() && next != order.end()) {
        block->start({*next % launch.grid_x, *next / launch.grid_x, 0});
        ++next;
      }
      if (!block->running()) continue;
      progress = block->step() || progress;
      if (block->running()) waiting = block.get();
    }
    if (waiting == nullptr && next == order.end()) return;
    if (progress) continue;
    // The blocks that came first have reached their grid_dependency_wait. The others begin after it.
    for (const auto& block : resident) progress = block->resume_dependents() || progress;
    if (!progress) throw std::runtime_error(std::string(launch.name) + ": " + waiting->deadlock());
    state.previous_ended = true;
    guard.open();
  }
}

void* dynamic_shared() {
  return Block::current().shared();
}

void block_barrier(int id, int threads, Site site) {
  Block::current().barrier(id, threads, false, site);
}

int block_vote(bool value, Site site) {
  return Block::current().barrier(0, 0, value, site);
}

void warp_barrier(uint32_t mask, Site site) {
  Block::current().collective(mask, nullptr, [](void* const(&)[32], uint32_t) {}, site, true);
}

void collective(uint32_t mask, void* op, void (*complete)(void* const (&)[32], uint32_t), Site site) {
  Block::current().collective(mask, op, complete, site, false);
}

void trap(const char* what, Site site) {
  Block::current().fail(std::string(what) + " at " + describe(site));
}

void grid_dependency_wait(Site site) {
  Block::current().wait_for_previous(site);
}

void yield() {
  ++yields;
  Block::current().yield();
}

uint64_t nanoseconds() {
  return 1000 * yields;
}

void fence() {
  Block::current().fence();
}

void atomic_operation(const void* p) {
  Block::current().atomic_operation(p);
}

void enqueue(const Copy& copy) {
  Block::current().thread().copies.push_back(copy);
}

void commit_copies() {
  Thread& thread = Block::current().thread();
  thread.groups.push_back(std::move(thread.copies));
  thread.copies.clear();
}

std::vector<Copy> arrived_copies(size_t pending) {
  std::vector<std::vector<Copy>>& groups = Block::current().thread().groups;
  std::vector<Copy> arrived;
  if (groups.size() <= pending) return arrived;
  const auto end = groups.end() - static_cast<std::ptrdiff_t>(pending);
  for (auto group = groups.begin(); group != end; ++group) arrived.insert(arrived.end(), group->begin(), group->end());
  groups.erase(groups.begin(), end);
  if (!arrived.empty()) Block::current().thread().copied = true;
  return arrived;
}

void fence_products() {
  Block::current().thread().products.fence();
}

void issue(Product product, void* d, size_t bytes, bool adds, Site site) {
  Block::current().issue(product, d, bytes, adds, site);
}

void commit_products() {
  Block::current().thread().products.commit();
}

void wait_for_products(size_t pending) {
  Block::current().thread().products.wait(pending);
}

void fence_async_shared() {
  Block::current().fence_async_shared();
}

}  // namespace emulation
