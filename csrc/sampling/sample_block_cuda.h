// A block that samples: its shared memory, its way through a row of numbers, the search for the place where
// their running total crosses a target, and the winner of a race. Every result is the same in all threads.
#pragma once

#include "common/cuda/ptx.h"
#include "common/cuda/reduce.h"
#include "common/cuda/vector_io.h"
#include "sampling/race.h"
#include "sampling/sample_plan.h"

namespace fastinfer::cuda {

inline constexpr int kQuad = 4;  // numbers that a lane takes at a time
using Quad = Vector<float, kQuad>;
inline constexpr int kWarpQuads = kQuad * kWarpSize;

struct SampleBlock {
  int lane, warp, warps;
  int max_candidates;
  int exchange_turn = 0;

  __device__ explicit SampleBlock(int max_candidates)
      : lane(threadIdx.x % kWarpSize),
        warp(threadIdx.x / kWarpSize),
        warps(blockDim.x / kWarpSize),
        max_candidates(max_candidates) {}

  // Shared memory, by functions rather than members: so the compiler sees that it is shared.
  __device__ uint64_t* candidates() const {
    return reinterpret_cast<uint64_t*>(dynamic_shared());
  }
  __device__ int* counter() const {
    return reinterpret_cast<int*>(candidates() + max_candidates);
  }

  // Memory to write before one barrier and read after it. It comes again after the next: two barriers later.
  __device__ double* exchange() {
    exchange_turn ^= 1;
    return reinterpret_cast<double*>(candidates() + max_candidates) + 2 + exchange_turn * kSampleExchange;
  }

  // `size` numbers are cut into one contiguous chunk per warp.
  __device__ int chunk_of(int size) const {
    return ((size + warps - 1) / warps + kWarpQuads - 1) / kWarpQuads * kWarpQuads;
  }

  // Calls fn(index, quad) for the warp's chunk of begin .. end; load(index) gives four numbers.
  template <class Load, class Fn>
  __device__ void for_each_quad(int begin, int end, Load&& load, Fn&& fn) const {
    const int chunk = chunk_of(end - begin), chunk_begin = begin + warp * chunk;
    const int chunk_end = min(chunk_begin + chunk, end);
#pragma unroll 2
    for (int i = chunk_begin + kQuad * lane; i < chunk_end; i += kWarpQuads) fn(i, load(i));
  }

  struct Place {
    int lane;
    double before;  // the lanes before it
  };

  // The first lane at which the running total of non-negative values reaches the target, else the last whose value is
  // not 0: a sum in parallel is neither monotone nor the sum of its parts' rounded sums.
  __device__ Place place_in_warp(double value, double target) const {
    double total = value;
    for (int offset = 1; offset < kWarpSize; offset *= 2) {
      const double other = __shfl_up_sync(kFullMask, total, offset);
      if (lane >= offset) total += other;
    }
    const unsigned positive = __ballot_sync(kFullMask, value > 0.0);
    const unsigned reached = __ballot_sync(kFullMask, value > 0.0 && total >= target);
    const int found = reached != 0 ? __ffs(reached) - 1 : 31 - __clz(positive | 1);
    return {found, __shfl_sync(kFullMask, total - value, found)};
  }

  template <class Weights>
  __device__ double chunk_sums(int begin, int end, Weights&& weights) {
    float sum = 0.0f;
    for_each_quad(begin, end, weights,
                  [&](int, Quad w) { sum += (w.values[0] + w.values[1]) + (w.values[2] + w.values[3]); });
    sum = warp_sum(sum);
    double* sums = exchange();
    if (lane == 0) sums[warp] = sum;
    __syncthreads();
    return lane < warps ? sums[lane] : 0.0;  // lane w: that of warp w's chunk
  }

  // The first index below `size` at which the running total of weights(i) >= 0 reaches target(total); one whose weight
  // is not 0. weights(i), i a multiple of 4, gives four of them, 0 past the end.
  template <class Weights, class Target>
  __device__ int crossing(int size, Weights&& weights, Target&& target) {
    double sum = chunk_sums(0, size, weights);  // each level is left with a chunk of the last one, half of it or less
    double total = sum;
    for (int offset = kWarpSize / 2; offset > 0; offset /= 2) total += __shfl_xor_sync(kFullMask, total, offset);
    double left = target(total);
    int begin = 0, end = size;
    while (true) {
      const Place place = place_in_warp(sum, left);
      const int chunk = chunk_of(end - begin);
      begin += place.lane * chunk;
      end = min(begin + chunk, end);
      left -= place.before;
      if (chunk == kWarpQuads) break;
      sum = chunk_sums(begin, end, weights);
    }
    Quad w{};
    if (begin + kQuad * lane < end) w = weights(begin + kQuad * lane);
    const Place place =
        place_in_warp(double{w.values[0]} + double{w.values[1]} + double{w.values[2]} + double{w.values[3]}, left);
    left -= place.before;
    int found = 0;
    bool reached = false;
    for (int j = 0; j < kQuad; ++j) {
      const float weight = __shfl_sync(kFullMask, w.values[j], place.lane);
      if (weight > 0.0f && !reached) {
        found = j;
        left -= weight;
        reached = left <= 0.0;
      }
    }
    return begin + kQuad * place.lane + found;
  }

  // The smallest value of all threads, in every thread.
  __device__ float minimum(float value) {
    value = -warp_max(-value);
    auto* const values = reinterpret_cast<float*>(exchange());
    if (lane == 0) values[warp] = value;
    __syncthreads();
    return -warp_max(lane < warps ? -values[lane] : -INFINITY);
  }

  // The race of all threads, with the winner, in every thread.
  __device__ Race winner(Race race) {
    merge_races(race);
    double* times = exchange();
    auto* tokens = reinterpret_cast<int32_t*>(times + kWarpSize);
    if (lane == 0) times[warp] = race.time, tokens[warp] = race.token;
    __syncthreads();
    if (lane < warps) race.add(times[lane], tokens[lane]);
    merge_races(race);
    return race;
  }

  // Gives the whole warp the race that is ahead.
  __device__ static void merge_races(Race& race) {
    for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
      const double time = __shfl_xor_sync(kFullMask, race.time, offset);
      race.add(time, __shfl_xor_sync(kFullMask, race.token, offset));
    }
  }
};

}  // namespace fastinfer::cuda
