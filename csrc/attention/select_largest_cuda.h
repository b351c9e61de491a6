// A block selects the largest of some numbers, and keeps them in their order: the least one that is selected follows
// digit by digit from histograms, then each selected number's place is how many come before it. Counts are exact in any
// order, so results do not depend on timing.
#pragma once

#include <cstdint>

#include "attention/select_largest_plan.h"
#include "common/cuda/reduce.h"

namespace fastinfer::cuda {

// Of blocks of kThreads threads, all of which call each function. number(i) is the number i of `count`.
template <int kThreads, int kDigitBits>
class SelectLargest {
  static constexpr int kDigits = 1 << kDigitBits, kOwn = kDigits / kWarpSize;  // of a lane
  static constexpr int kWarps = kThreads / kWarpSize;
  static constexpr int kAtOnce = 4;  // numbers that a thread reads at once
  static_assert(kOwn > 0 && kWarps <= kWarpSize);

 public:
  // Larger numbers are selected, and of those that equal this one the first `equal` ones.
  struct Limit {
    uint32_t number;
    int equal;
  };

  // `shared` has select_largest_bytes.
  __device__ explicit SelectLargest(int* shared)
      : counts_(shared),
        larger_of_(shared + kDigits + kWarpSize),
        equal_of_(larger_of_ + kWarps),
        found_(equal_of_ + kWarps) {}

  // The limit of the `rank` largest numbers, at most `count`.
  template <class Number>
  __device__ Limit find_limit(int count, int rank, const Number& number) const {
    return find_limit(count, rank, number, [](uint32_t) { return 1; });
  }

  // The limit of the largest numbers whose amounts, amount(number) each, add up to at least `rank`, which all amounts
  // do.
  template <class Number, class Amount>
  __device__ Limit find_limit(int count, int rank, const Number& number, const Amount& amount) const {
    Limit limit{0, rank};
    for (int end = 32; end > 0;) {
      const int shift = max(end - kDigitBits, 0);
      const uint32_t mask = (1u << (end - shift)) - 1;
      __syncthreads();
      for (int i = thread(); i < kDigits + kWarpSize; i += kThreads) counts_[i] = 0;
      __syncthreads();
      for (int first = thread(); first < count; first += kAtOnce * kThreads) {
        uint32_t own[kAtOnce];
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) own[j] = first + j * kThreads < count ? number(first + j * kThreads) : 0;
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          const bool same = end == 32 || (own[j] ^ limit.number) >> end == 0;
          if (same && first + j * kThreads < count) atomicAdd(counts_ + place(own[j] >> shift & mask), amount(own[j]));
        }
      }
      __syncthreads();
      if (warp() == 0) find_digit(limit.equal);
      __syncthreads();
      limit.number |= static_cast<uint32_t>(found_[0]) << shift;
      limit.equal -= found_[1];
      end = shift;
    }
    return limit;
  }

  // Calls put(place, i) for each selected number i; places count from 0 in ascending order of i. Returns their number.
  template <class Number, class Put>
  __device__ int for_each_selected(int count, const Limit& limit, const Number& number, const Put& put) const {
    // A warp has numbers of its own, one behind the other, so that it waits for the others only once.
    const int share = (count + kThreads - 1) / kThreads * kWarpSize;
    const int begin = min(warp() * share, count), end = min(begin + share, count);
    int larger = 0, equal = 0;
    for_each_round(begin, end, number, [&](int, bool is_own, uint32_t own) {
      larger += is_own && own > limit.number;
      equal += is_own && own == limit.number;
    });
    larger = warp_sum(larger), equal = warp_sum(equal);
    if (lane() == 0) larger_of_[warp()] = larger, equal_of_[warp()] = equal;
    __syncthreads();
    const int all_larger = warp_sum(lane() < kWarps ? larger_of_[lane()] : 0);
    const int all_equal = warp_sum(lane() < kWarps ? equal_of_[lane()] : 0);
    larger = warp_sum(lane() < warp() ? larger_of_[lane()] : 0);
    equal = warp_sum(lane() < warp() ? equal_of_[lane()] : 0);
    for_each_round(begin, end, number, [&](int i, bool is_own, uint32_t own) {
      const bool is_larger = is_own && own > limit.number, is_equal = is_own && own == limit.number;
      const unsigned larger_lanes = __ballot_sync(kFullMask, is_larger), below = (1u << lane()) - 1;
      const unsigned equal_lanes = __ballot_sync(kFullMask, is_equal);
      const int equal_before = equal + __popc(equal_lanes & below);
      if (is_larger || (is_equal && equal_before < limit.equal)) {
        put(larger + __popc(larger_lanes & below) + min(equal_before, limit.equal), i);
      }
      larger += __popc(larger_lanes), equal += __popc(equal_lanes);
    });
    return all_larger + min(all_equal, limit.equal);
  }

 private:
  __device__ static int thread() {
    return static_cast<int>(threadIdx.x);
  }
  __device__ static int lane() {
    return thread() % kWarpSize;
  }
  __device__ static int warp() {
    return thread() / kWarpSize;
  }

  // Where a digit is counted: the digits of each lane lie in different banks.
  __device__ static int place(uint32_t digit) {
    return static_cast<int>(digit + digit / kOwn);
  }

  // Calls fn(i, whether it is before `end`, number(i)) with all lanes of the warp.
  template <class Number, class Fn>
  __device__ static void for_each_round(int begin, int end, const Number& number, const Fn& fn) {
    for (int first = begin + lane(); first - lane() < end; first += kAtOnce * kWarpSize) {
      uint32_t own[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) own[j] = first + j * kWarpSize < end ? number(first + j * kWarpSize) : 0;
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) fn(first + j * kWarpSize, first + j * kWarpSize < end, own[j]);
    }
  }

  // The digit of the number of this rank in descending order, and how many have larger ones. One warp.
  __device__ void find_digit(int rank) const {
    const int* const own = counts_ + place(kDigits - kOwn * (lane() + 1));
    int end = 0;
    for (int i = 0; i < kOwn; ++i) end += own[i];
    int above = -end;
    for (int step = 1; step < kWarpSize; step *= 2) {
      const int other = __shfl_up_sync(kFullMask, end, step);
      if (lane() >= step) end += other;
    }
    above += end;
    if (above >= rank || end < rank) return;
    int i = kOwn - 1;
    for (; above + own[i] < rank; --i) above += own[i];
    found_[0] = kDigits - kOwn * (lane() + 1) + i;
    found_[1] = above;
  }

  int *counts_, *larger_of_, *equal_of_, *found_;
};

}  // namespace fastinfer::cuda
