// Finds where top-k and top-p end without sorting the vocabulary: each pass over the row counts and weighs what lies
// above four pivots, until few enough candidates remain to be sorted in shared memory. The pivot method is FlashInfer's
// (https://flashinfer.ai/2025/03/10/sampling.html), the sorted remainder is what makes it exact.
#pragma once

#include "sampling/sample_race_cuda.h"

namespace fastinfer::cuda {

class SampleSelection {
 public:
  // Everything down to `lowest` is kept, until a cut.
  __device__ SampleSelection(SampleBlock& block, const SampleRow& row, float lowest)
      : block_(block), row_(row), last_{lowest, row.end} {}

  // Sorts `size` candidates that others have put into shared memory: all tokens of the row from `floor` on, as far as
  // they are kept.
  __device__ void take(int size, float floor) {
    sort(size);
    size_ = size;
    listed_ = floor <= last_.z;
    begins_listed_ = true;
  }

  __device__ void keep_top_k(int k) {
    if (begins_listed_ && size_ >= k) listed_ = true;  // the others are not among the first k
    begins_listed_ = false;
    cut(true, k);
    // Known but not listed: what is kept may still be few enough.
    if (!listed_ && k <= block_.max_candidates) list(last_.z, INFINITY);
  }

  // `total`: the mass of all that is kept so far, 0 if it is not known.
  __device__ void keep_top_p(float p, float total);

  // Returns true if the kept tokens, and no others, are sorted in shared memory.
  __device__ bool listed() const {
    return listed_;
  }
  __device__ int size() const {
    return size_;
  }
  __device__ int token(int rank) const {
    return static_cast<int>(block_.candidates()[rank] & 0xffffffffu);
  }

  // The race between the tokens that are kept, with its winner.
  __device__ Race draw(const SampleParams& p);

 private:
  static constexpr int kPivots = 4;

  // Candidates are lo <= z < hi. Those from lo on reach the target, those from hi on do not.
  struct Bracket {
    float lo, hi;
    double count_lo, count_hi, mass_hi;
  };

  __device__ float z(int rank) const {
    return from_ordered_bits(~static_cast<uint32_t>(block_.candidates()[rank] >> 32));
  }

  __device__ auto listed_weights() const {
    return [this](int rank) {
      Quad w;
      for (int j = 0; j < kQuad; ++j) w.values[j] = rank + j < size_ ? row_.weight(z(rank + j)) : 0.0f;
      return w;
    };
  }

  __device__ void race_listed(const SampleParams& p, Race& race) const;
  __device__ void race_row(const SampleParams& p, Race& race);

  // Keeps the first tokens whose number is `amount`, or the first whose mass is that share.
  __device__ void cut(bool by_count, double amount);
  __device__ void pivots(const Bracket& bracket, int round, float (&pivot)[kPivots]) const;
  __device__ void weigh(const float (&pivot)[kPivots], double (&count)[kPivots], double (&mass)[kPivots]);
  __device__ void list(float lo, float hi);
  __device__ void sort(int count);

  SampleBlock& block_;
  const SampleRow& row_;
  LastKept last_;
  bool listed_ = false;
  bool begins_listed_ = false;  // the first size_ of what is kept are sorted in shared memory
  int size_ = 0;
};

__device__ inline void SampleSelection::keep_top_p(float p, float total) {
  if (begins_listed_ && !listed_ && size_ > 0 && total > 0.0f) {
    const double target = double{p} * double{total};
    double listed = 0.0;
    const int rank = block_.crossing(size_, listed_weights(), [&](double mass) {
      listed = mass;
      return target;
    });
    if (listed >= target) {
      last_ = {z(rank), token(rank)};
      size_ = rank + 1;
      listed_ = true;
      return;
    }
  }
  cut(false, p);
}

__device__ inline Race SampleSelection::draw(const SampleParams& p) {
  Race race;
  if (listed_) {
    race_listed(p, race);
  } else {
    race_row(p, race);
  }
  return block_.winner(race);
}

// A call, so that nothing around it takes registers from the held logits.
__device__ __attribute__((noinline)) inline void SampleSelection::race_row(const SampleParams& p, Race& race) {
  for (int begin = row_.begin; begin < row_.end; begin += HeldQuads<kRowQuads>::tokens()) {
    race_held(block_, p, row_, HeldQuads<kRowQuads>(block_, row_, begin), last_, race);
  }
}

// The likeliest come first, so that few others need noise in fp64.
__device__ inline void SampleSelection::race_listed(const SampleParams& p, Race& race) const {
  for (int begin = 0; begin < size_; begin += static_cast<int>(blockDim.x)) {
    const int rank = begin + static_cast<int>(threadIdx.x);
    if (rank < size_) {
      const BlockWord word = noise_of_row(p).block_word(token(rank));
      const float latest = static_cast<float>(race.time) * row_.weight(z(rank)) * kBoundMargin;
      if (least_noise_bound_fp32(word) <= latest) {
        race.add(arrival(p, token(rank), word, z(rank), row_.maximum, race.time), token(rank));
      }
    }
    if (begin + static_cast<int>(blockDim.x) < size_) SampleBlock::merge_races(race);
  }
}

// One copy for its three callers: inlined, they spilled registers.
__device__ __attribute__((noinline)) inline void SampleSelection::cut(bool by_count, double amount) {
  Bracket bracket{last_.z, nextafterf(row_.maximum, INFINITY), static_cast<double>(row_.end), 0.0, 0.0};
  double target = 0.0;
  bool known = false;  // the target, which is a share of all that is kept
  if (!listed_) {
    for (int round = 0; bracket.count_lo - bracket.count_hi > block_.max_candidates; ++round) {
      if (round > 0 && !(nextafterf(bracket.lo, INFINITY) < bracket.hi)) break;  // candidates are all equal
      float pivot[kPivots];
      double count[kPivots], mass[kPivots];
      pivots(bracket, round, pivot);
      weigh(pivot, count, mass);
      if (round == 0) target = by_count ? fmin(amount, count[0]) : amount * mass[0];  // the first pivot is last_.z
      known = true;
      for (int j = 0; j < kPivots; ++j) {
        if ((by_count ? count[j] : mass[j]) >= target) {
          if (pivot[j] >= bracket.lo) bracket.lo = pivot[j], bracket.count_lo = count[j];
        } else if (pivot[j] < bracket.hi) {
          bracket.hi = pivot[j], bracket.count_hi = count[j], bracket.mass_hi = mass[j];
        }
      }
    }
    const bool few = bracket.count_lo <= block_.max_candidates;
    if (few) bracket.hi = INFINITY, bracket.count_hi = bracket.mass_hi = 0.0;
    if (bracket.count_lo - bracket.count_hi > block_.max_candidates) {
      // Equal candidates without end: the wanted number of them is the last in order of id.
      const double wanted =
          by_count ? target - bracket.count_hi : ceil((target - bracket.mass_hi) / row_.weight(bracket.lo));
      const auto equal = [&](int token) {
        Quad w = row_(token);
        for (int j = 0; j < kQuad; ++j) {
          w.values[j] = w.values[j] == bracket.lo && last_.keeps(w.values[j], token + j) ? 1.0f : 0.0f;
        }
        return w;
      };
      last_ = {bracket.lo, block_.crossing(row_.end, equal, [&](double) { return wanted; })};
      return;
    }
    list(bracket.lo, bracket.hi);
    listed_ = few;
  }
  const auto target_of = [&](double total) { return known ? target - bracket.mass_hi : amount * total; };
  const int rank =
      by_count ? static_cast<int>(fmin(known ? target - bracket.count_hi : amount, static_cast<double>(size_))) - 1
               : block_.crossing(size_, listed_weights(), target_of);
  last_ = {z(rank), token(rank)};
  size_ = rank + 1;
}

// The first round tries what is usual, the maximum less a few temperatures. Then the bracket is cut into fifths, by
// value; every other round from the fifth on by the floats' bits, which ends the search of any row after 20 rounds.
__device__ inline void SampleSelection::pivots(const Bracket& bracket, int round, float (&pivot)[kPivots]) const {
  const float next = nextafterf(bracket.lo, INFINITY);
  const uint32_t lo_bits = ordered_bits(bracket.lo), bits = ordered_bits(bracket.hi) - lo_bits;
  for (int j = 0; j < kPivots; ++j) {
    const float share = static_cast<float>(j + 1) / (kPivots + 1);
    if (round == 0) {
      const float unit = kLog2e / row_.scale;
      pivot[j] = j == 0 ? bracket.lo : fmaxf(row_.maximum - unit * static_cast<float>(256 >> (2 * j)), bracket.lo);
    } else if (round >= 4 && round % 2 == 0) {
      pivot[j] = from_ordered_bits(lo_bits + static_cast<uint32_t>(static_cast<double>(bits) * share)) + 0.0f;
    } else {
      pivot[j] = bracket.lo * (1.0f - share) + fminf(bracket.hi, FLT_MAX) * share + 0.0f;
    }
    if (round > 0 && !(pivot[j] > bracket.lo && pivot[j] < bracket.hi)) pivot[j] = next;
  }
}

// The number and the mass of what is kept from each pivot on. Added up in the same order in every pass, so that a
// higher pivot never weighs more.
__device__ inline void SampleSelection::weigh(const float (&pivot)[kPivots], double (&count)[kPivots],
                                              double (&mass)[kPivots]) {
  float masses[kPivots] = {};
  int counts[kPivots] = {};
  const float lowest = fminf(fminf(pivot[0], pivot[1]), fminf(pivot[2], pivot[3]));
  for_each_quad(block_, row_, [&](int token, Quad quad) {
    for (int i = 0; i < kQuad; ++i) {
      const float value = quad.values[i];
      if (value < lowest || !last_.keeps(value, token + i)) continue;
      const float weight = row_.weight(value);
      for (int j = 0; j < kPivots; ++j) {
        masses[j] += value >= pivot[j] ? weight : 0.0f;
        counts[j] += value >= pivot[j];
      }
    }
  });
  // A column of numbers per warp; each is added up by one warp, and handed out behind another barrier.
  double* columns = block_.exchange();
  for (int j = 0; j < kPivots; ++j) {
    const float sum = warp_sum(masses[j]);
    const float number = warp_sum(static_cast<float>(counts[j]));  // exact up to 2^24
    if (block_.lane == 0) {
      columns[2 * j * kWarpSize + block_.warp] = sum;
      columns[(2 * j + 1) * kWarpSize + block_.warp] = number;
    }
  }
  __syncthreads();
  double* totals = columns + 2 * kPivots * kWarpSize;
  for (int row = block_.warp; row < 2 * kPivots; row += block_.warps) {
    double sum = block_.lane < block_.warps ? columns[row * kWarpSize + block_.lane] : 0.0;
    for (int offset = kWarpSize / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(kFullMask, sum, offset);
    if (block_.lane == 0) totals[row] = sum;
  }
  __syncthreads();
  for (int j = 0; j < kPivots; ++j) mass[j] = totals[2 * j], count[j] = totals[2 * j + 1];
}

// Collects what is kept with lo <= z < hi into shared memory, sorted. One copy, as `cut`.
__device__ __attribute__((noinline)) inline void SampleSelection::list(float lo, float hi) {
  if (threadIdx.x == 0) *block_.counter() = 0;
  __syncthreads();
  for_each_quad(block_, row_, [&](int token, Quad quad) {
    for (int j = 0; j < kQuad; ++j) {
      const float value = quad.values[j];
      if (!(value >= lo && value < hi) || !last_.keeps(value, token + j)) continue;
      block_.candidates()[atomicAdd(block_.counter(), 1)] =
          uint64_t{~ordered_bits(value)} << 32 | static_cast<uint32_t>(token + j);
    }
  });
  __syncthreads();
  size_ = *block_.counter();
  listed_ = true;
  sort(size_);
}

// Bitonic sort: falling logits, then rising ids. A warp sorts a contiguous share of the keys, so that most steps read
// what the same warp has written, and need no barrier of the block.
__device__ inline void SampleSelection::sort(int count) {
  uint64_t* keys = block_.candidates();
  const int size = count > 1 ? 1 << (32 - __clz(count - 1)) : 1;
  for (int i = count + static_cast<int>(threadIdx.x); i < size; i += blockDim.x) keys[i] = ~uint64_t{0};
  const int pairs = max(size / 2 / block_.warps, kWarpSize), begin = block_.warp * pairs;
  const int end = min(begin + pairs, size / 2);
  bool alone = false;  // the warp has written what it reads next
  for (int run = 2; run <= size; run *= 2) {
    for (int distance = run / 2; distance > 0; distance /= 2) {
      if (alone && distance <= pairs) {
        __syncwarp();
      } else {
        __syncthreads();
      }
      alone = distance <= pairs;
      for (int pair = begin + block_.lane; pair < end; pair += kWarpSize) {
        const int i = 2 * pair - (pair & (distance - 1)), j = i + distance;
        const bool falling = (i & run) != 0;
        const uint64_t a = keys[i], b = keys[j];
        if ((a > b) != falling) keys[i] = b, keys[j] = a;
      }
    }
  }
  __syncthreads();
}

}  // namespace fastinfer::cuda
