// What waiting threads read ahead, with the file under test included: what it keeps to itself is looked at. Run by
// test_read_ahead.py; exits with 0 where all holds.
#include "common/cpu/read_ahead.cpp"

#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <thread>

using namespace fastinfer::cpu;

namespace {

#define EXPECT(condition)                                     \
  do {                                                        \
    if (!(condition)) {                                       \
      std::fprintf(stderr, "%d: %s\n", __LINE__, #condition); \
      std::exit(1);                                           \
    }                                                         \
  } while (false)

constexpr size_t kAtOnce = kLinesAtOnce * kLine;

// Bytes that it prefetches until there is nothing to do.
size_t bytes_of(WaitingReader& reader) {
  size_t bytes = 0;
  while (reader.prefetch()) bytes += kAtOnce;
  return bytes;
}

}  // namespace

int main() {
  std::vector<std::byte> a(16 * kAtOnce), b(32 * kAtOnce), large(4 * kMostBytes);
  const auto list = [](const std::vector<std::byte>& x, const std::vector<std::byte>& y) {
    return std::make_shared<const std::vector<Memory>>(
        std::vector<Memory>{{x.data(), x.size()}, {y.data(), y.size()}, {nullptr, 0}});
  };
  const Weights weights = list(a, b), others = list(large, a);
  WaitingReader half(1, 2), whole(0, 1);

  EXPECT(bytes_of(whole) == 0);
  reached(a.data());
  EXPECT(bytes_of(whole) == 0);

  // Its own share of all that follows, once.
  read_ahead_from_start(weights);
  EXPECT(bytes_of(whole) == a.size() + b.size() + kAtOnce);  // the empty one is noticed late
  EXPECT(bytes_of(half) == (a.size() + b.size()) / 2 + kAtOnce);
  EXPECT(bytes_of(whole) == 0);
  reached(a.data());
  EXPECT(bytes_of(whole) == b.size() + kAtOnce);
  reached(a.data());  // lies behind
  reached(large.data());
  reached(nullptr);
  EXPECT(bytes_of(whole) == 0);
  reached(b.data());
  EXPECT(bytes_of(whole) == kAtOnce);
  read_ahead_from_start(weights);
  EXPECT(bytes_of(whole) == a.size() + b.size() + kAtOnce);

  // Another list; and no more than so much of a large weight.
  read_ahead_from_start(others);
  EXPECT(bytes_of(whole) == kMostBytes);
  EXPECT(bytes_of(half) == kMostBytes);

  // Where the lock is taken nobody waits, and a waiting thread may go to sleep.
  read_ahead_from_start(weights);
  std::thread([&] {
    const std::lock_guard lock(upcoming().mutex);
    std::thread([&] {
      EXPECT(bytes_of(whole) == 0);
      read_ahead_from_start(others);
      reached(a.data());
    }).join();
  }).join();
  EXPECT(bytes_of(whole) == a.size() + b.size() + kAtOnce);

  // A child has a lock of its own, whatever its parent was at.
  upcoming().mutex.lock();
  const pid_t child = fork();
  if (child == 0) {
    WaitingReader reader(0, 1);
    EXPECT(bytes_of(reader) == 0);
    read_ahead_from_start(weights);
    EXPECT(bytes_of(reader) == a.size() + b.size() + kAtOnce);
    _exit(0);
  }
  upcoming().mutex.unlock();
  int status = 1;
  EXPECT(waitpid(child, &status, 0) == child);
  EXPECT(status == 0);
}
