#include "parallel/process_group.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <stdexcept>
#include <string>

namespace fastinfer::parallel {
namespace {

using Clock = std::chrono::steady_clock;

// About 50 us of pauses: longer than ranks are apart that have a core each. Then a waiting rank gives its core to one
// that may need it, and after kYields (1 ms or more) it sleeps between its looks, as its peer must be far behind.
constexpr int kSpins = 4096, kYields = 2048;
constexpr long kNapNanoseconds = 50'000;
// A rank without work looks for a message for so long before it sleeps: longer than Python needs between two steps.
constexpr std::chrono::milliseconds kIdleSpin{2};
// A sleeping rank looks at the flag so often, in case nobody was left to wake it.
constexpr long kSleepNanoseconds = 100'000'000;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// One round of a wait that began `round` rounds ago.
void relax(int round) {
  if (round < kSpins) {
    pause();
  } else if (round < kSpins + kYields) {
    sched_yield();
  } else {
    const timespec nap{0, kNapNanoseconds};
    nanosleep(&nap, nullptr);
  }
}

// The group that a team is part of, or the group itself.
Group& whole(Group& group) {
  return *reinterpret_cast<Group*>(reinterpret_cast<std::byte*>(&group) - group.whole_offset);
}

void check_not_aborted(Group& group) {
  if (whole(group).aborted.load(std::memory_order_acquire) != 0)
    throw std::runtime_error("the group of ranks was aborted");
}

// Waits until ready() holds for each of the ranks first .. end - 1.
template <class Ready>
void wait_for_ranks(Group& group, int first, int64_t end, const char* what, int64_t deadline_ns, const Ready& ready) {
  const auto start = Clock::now();
  int rank = first;
  for (int round = 0;; ++round) {
    while (rank < end && ready(group.ranks[rank])) ++rank;
    if (rank == end) return;
    check_not_aborted(group);
    relax(round);
    if (round % 64 == 63 && Clock::now() - start > std::chrono::nanoseconds(deadline_ns)) {
      abort(group);
      throw std::runtime_error("rank " + std::to_string(group.first_rank + rank) + " did not " + what + " within " +
                               std::to_string(deadline_ns / 1'000'000) + " ms");
    }
  }
}

// The same of a whole step.
template <class Ready>
void wait_for_steps(Group& group, int first, int64_t end, const Ready& ready) {
  wait_for_ranks(group, first, end, "finish its step", kStepDeadlines * group.deadline_ns, ready);
}

Message& message_at(Group& group, uint32_t number) {
  return group.messages[number % static_cast<uint32_t>(group.num_messages)];
}

// Between processes, so not FUTEX_PRIVATE.
void futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* timeout) {
  static_assert(sizeof(word) == sizeof(uint32_t));
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, timeout, nullptr, 0);
}

}  // namespace

void initialize(Group& group, int64_t size, int64_t slot_bytes, double deadline_seconds, int64_t num_messages) {
  if (size < 1 || size > kMaxRanks) {
    throw std::invalid_argument("size must be between 1 and " + std::to_string(kMaxRanks) + ", got " +
                                std::to_string(size));
  }
  if (num_messages < 1 || num_messages > kMaxMessages) {
    throw std::invalid_argument("num_messages must be between 1 and " + std::to_string(kMaxMessages) + ", got " +
                                std::to_string(num_messages));
  }
  group.size = size;
  group.slot_bytes = slot_bytes;
  group.deadline_ns = static_cast<int64_t>(deadline_seconds * 1e9);
  group.num_messages = num_messages;
}

void initialize_team(Group& team, const Group& whole, int64_t first_rank, int64_t size) {
  if (first_rank < 0 || size < 1 || first_rank + size > whole.size) {
    throw std::invalid_argument("a team must have ranks of a group of " + std::to_string(whole.size) + ", got " +
                                std::to_string(size) + " from " + std::to_string(first_rank) + " on");
  }
  initialize(team, size, whole.slot_bytes, static_cast<double>(whole.deadline_ns) * 1e-9);
  team.whole_offset = reinterpret_cast<const std::byte*>(&team) - reinterpret_cast<const std::byte*>(&whole);
  team.first_rank = first_rank;
}

std::byte* next_slot(Group& group, int rank) {
  const uint64_t number = group.ranks[rank].arrived.load(std::memory_order_relaxed);
  return reinterpret_cast<std::byte*>(&group) + kSlotsOffset + number % 2 * static_cast<size_t>(group.slot_bytes);
}

void exchange(Group& group, int rank, uint64_t tag, uint64_t bytes) {
  RankState& self = group.ranks[rank];
  const uint64_t number = self.arrived.load(std::memory_order_relaxed);
  self.bytes.store(self.bytes.load(std::memory_order_relaxed) + bytes, std::memory_order_relaxed);
  self.tags[number % 2].store(tag, std::memory_order_relaxed);
  self.arrived.store(number + 1, std::memory_order_release);
  wait_for_ranks(group, 0, group.size, "exchange its part", group.deadline_ns,
                 [number](const RankState& state) { return state.arrived.load(std::memory_order_acquire) > number; });
  for (int64_t other = 0; other < group.size; ++other) {
    if (group.ranks[other].tags[number % 2].load(std::memory_order_relaxed) == tag) continue;
    abort(group);
    throw std::runtime_error("rank " + std::to_string(group.first_rank + other) +
                             " exchanges something else than rank " + std::to_string(group.first_rank + rank) +
                             " in exchange " + std::to_string(number));
  }
}

void send(Group& group, const std::vector<int64_t>& words) {
  if (words.size() > kMessageWords) {
    throw std::invalid_argument("a message must have at most " + std::to_string(kMessageWords) + " words, got " +
                                std::to_string(words.size()));
  }
  check_not_aborted(group);
  const uint32_t number = group.message_number.load(std::memory_order_relaxed);
  wait_for_steps(group, 1, group.size, [&](const RankState& state) {
    return number - state.done.load(std::memory_order_acquire) < static_cast<uint32_t>(group.num_messages);
  });
  Message& message = message_at(group, number);
  message.num_words = static_cast<int64_t>(words.size());
  std::copy(words.begin(), words.end(), message.words);
  group.message_number.store(number + 1, std::memory_order_release);
  futex(group.message_number, FUTEX_WAKE, INT_MAX, nullptr);
}

std::vector<int64_t> receive(Group& group, int rank) {
  const uint32_t done = group.ranks[rank].done.load(std::memory_order_relaxed);
  const auto start = Clock::now();
  for (int round = 0; group.message_number.load(std::memory_order_acquire) == done; ++round) {
    check_not_aborted(group);
    if (round % 64 != 63 || Clock::now() - start < kIdleSpin) {
      round < kSpins ? pause() : static_cast<void>(sched_yield());
    } else {
      const timespec timeout{0, kSleepNanoseconds};
      futex(group.message_number, FUTEX_WAIT, done, &timeout);
    }
  }
  const Message& message = message_at(group, done);
  return {message.words, message.words + message.num_words};
}

void finish(Group& group, int rank) {
  std::atomic<uint32_t>& done = group.ranks[rank].done;
  done.store(done.load(std::memory_order_relaxed) + 1, std::memory_order_release);
}

void wait_for(Group& group, int rank, int other) {
  const uint32_t number = group.ranks[rank].done.load(std::memory_order_relaxed);
  wait_for_steps(group, other, other + 1, [number](const RankState& state) {
    return static_cast<int32_t>(state.done.load(std::memory_order_acquire) - number) > 0;
  });
}

void abort(Group& group) {
  whole(group).aborted.store(1, std::memory_order_release);
  futex(whole(group).message_number, FUTEX_WAKE, INT_MAX, nullptr);
}

}  // namespace fastinfer::parallel
