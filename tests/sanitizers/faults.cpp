// Code like that of the CPU kernels with a planted fault each, and its sound twin: what the sanitizers must report, and
// must not.
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string_view>
#include <thread>

#include "common/cpu/parallel.h"
#include "common/cpu/vec.h"

namespace fastinfer::cpu::FASTINFER_ISA {
namespace {

// The compiler must not know what a fault will do.
template <class T>
T hidden(T value) {
  asm volatile("" : "+r"(value));
  return value;
}

float sum_of(f32v v) {
  float sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += v[i];
  return sum;
}

// The fault: a whole vector is read where one element less is left.
float out_of_bounds_load(bool fault) {
  const int count = hidden(2 * kLanes - (fault ? 1 : 0));
  const auto values = std::make_unique<float[]>(count);
  return sum_of(load(values.get()) + load(values.get() + kLanes));
}

// The fault: the last vector is written as a whole.
float out_of_bounds_store(bool fault) {
  const int count = hidden(2 * kLanes - (fault ? 1 : 0));
  const auto values = std::make_unique<float[]>(count);
  store_as(values.get() + kLanes, broadcast(1));
  return values[count - 1];
}

// The fault: memory of one call's scratch that an earlier, larger call had.
float beyond_scratch(bool fault) {
  constexpr int kSmall = 5;
  float* const large = scratch_array<float>(0, 1000);
  std::memset(large, 0, 1000 * sizeof(float));
  const float* const small = scratch_array<float>(0, kSmall);
  return small[hidden(kSmall - (fault ? 0 : 1))];
}

// The fault: all bits are shifted out.
float undefined_shift(bool fault) {
  return static_cast<float>(int32_t{1} << hidden(fault ? 32 : 4));
}

// The fault: a sum beyond the type's range.
float signed_overflow(bool fault) {
  return static_cast<float>(hidden(INT32_MAX) + (fault ? 1 : 0));
}

// The fault: a word that is read through a pointer that is not aligned.
float unaligned_access(bool fault) {
  alignas(8) unsigned char bytes[16] = {};
  return static_cast<float>(*reinterpret_cast<const int32_t*>(hidden(bytes + (fault ? 1 : 4))));
}

// Runs fn(0) and fn(1) on two threads that are inside at the same time, and nothing orders.
template <class Fn>
void on_two_threads(const Fn& fn) {
  std::atomic<int> inside{0};
  set_num_threads(2);
  parallel_for(2, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      inside.fetch_add(1, std::memory_order_relaxed);
      while (inside.load(std::memory_order_relaxed) < 2) std::this_thread::yield();
      fn(i);
    }
  });
}

// The fault: both threads add to one sum, several times: ThreadSanitizer can miss two accesses at the same moment.
float shared_sum(bool fault) {
  float sums[2] = {};
  on_two_threads([&](int64_t i) {
    for (int repeat = 0; repeat < 100; ++repeat) *hidden(&sums[fault ? 0 : i]) += 1;
  });
  return sums[0];
}

// The fault: one thread's range begins in that of the other.
float overlapping_ranges(bool fault) {
  constexpr int kItems = 3 * kLanes;
  float values[2 * kItems] = {};
  on_two_threads([&](int64_t i) {
    const int64_t begin = i * kItems - (fault ? i : 0);
    for (int64_t j = begin; j < (i + 1) * kItems; ++j) values[j] = 1;
  });
  return values[0];
}

// The fault: what one thread has written, another reads without waiting for it.
float early_read(bool fault) {
  float value = 0, seen = 0;
  std::atomic<bool> ready{false};
  on_two_threads([&](int64_t i) {
    if (i == 0) {
      value = 1;
      ready.store(true, fault ? std::memory_order_relaxed : std::memory_order_release);
    } else {
      while (!ready.load(fault ? std::memory_order_relaxed : std::memory_order_acquire)) std::this_thread::yield();
      seen = value;
    }
  });
  return seen;
}

struct Case {
  std::string_view name;
  float (*run)(bool fault);
};

constexpr Case kCases[] = {
    {"out_of_bounds_load", out_of_bounds_load},
    {"out_of_bounds_store", out_of_bounds_store},
    {"beyond_scratch", beyond_scratch},
    {"undefined_shift", undefined_shift},
    {"signed_overflow", signed_overflow},
    {"unaligned_access", unaligned_access},
    {"shared_sum", shared_sum},
    {"overlapping_ranges", overlapping_ranges},
    {"early_read", early_read},
};

int run_case(std::string_view name, bool fault) {
  for (const Case& c : kCases) {
    if (c.name != name) continue;
    static_cast<void>(hidden(c.run(fault) > 0));
    return 0;
  }
  std::fprintf(stderr, "no such case\n");
  return 2;
}

}  // namespace
}  // namespace fastinfer::cpu::FASTINFER_ISA

// faults NAME [sound]: exits with 0, or as a sanitizer wills.
int main(int argc, char** argv) {
  if (argc < 2) return 2;
  const bool sound = argc > 2 && std::string_view(argv[2]) == "sound";
  return fastinfer::cpu::FASTINFER_ISA::run_case(argv[1], !sound);
}
