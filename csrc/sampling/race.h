// The draw as a race: every token arrives at the time E / w, where w is its weight and E exponential noise, and the
// first to arrive is drawn. Token t wins with the probability w_t / sum(w). (This is the Gumbel-max trick: -log E is
// Gumbel noise.) The noise depends on seed, position and token alone. Two distributions that share it, a draft model's
// and the model's own, therefore mostly have the same winner: with a probability of at least (1 - d) / (1 + d), where d
// is their distance in total variation (Daliri et al., 2024, https://arxiv.org/abs/2408.07978).
//
// The noise is made from the top down (Maddison et al., 2014, https://arxiv.org/abs/1411.0030). The least of 64
// exponential numbers is exponential too, with 64 times the rate; its place is uniform; and the others exceed it by
// exponential numbers. So one number tells of most blocks of 64 tokens that none of them can win.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/dtype.h"
#include "sampling/philox.h"

namespace fastinfer {

inline constexpr int kNoiseBlock = 64;
inline constexpr int kNoiseGroup = 4 * kNoiseBlock;  // tokens of the blocks that share a Philox

enum NoiseStream : uint32_t { kBlockStream, kTokenStream };

// What decides a block's least number: its upper 26 bits the size, its lower 6 the place.
using BlockWord = uint32_t;

// -log(1 - u), which is more than u: a bound that needs no logarithm.
FASTINFER_HOST_DEVICE inline double exponential(double u) {
  return -std::log1p(-u);
}

// Less than all noise of the block, and up to a logarithm's curvature the least.
FASTINFER_HOST_DEVICE inline double least_noise_bound(BlockWord word) {
  return (static_cast<double>(word >> 6) + 0.5) * (0x1p-26 / kNoiseBlock);
}

struct TokenNoise {
  uint64_t seed, position;

  // The words of the blocks 4 * group to 4 * group + 3.
  FASTINFER_HOST_DEVICE Philox block_words(int64_t group) const {
    return Philox(seed, position, static_cast<uint32_t>(group), kBlockStream);
  }

  FASTINFER_HOST_DEVICE BlockWord block_word(int64_t token) const {
    return block_words(token / kNoiseGroup).word(static_cast<int>(token / kNoiseBlock % 4));
  }

  // The words of the tokens 4 * (token / 4) to 4 * (token / 4) + 3.
  FASTINFER_HOST_DEVICE Philox excess_words(int64_t token) const {
    return Philox(seed, position, static_cast<uint32_t>(token / 4), kTokenStream);
  }

  // The uniform number of the exponential one by which a token exceeds its block's least.
  FASTINFER_HOST_DEVICE double excess_uniform(int64_t token) const {
    return (static_cast<double>(excess_words(token).word(static_cast<int>(token % 4))) + 0.5) * 0x1p-32;
  }
};

// When a token arrives; infinity if that is later than `latest`, which the bounds mostly tell without a logarithm. In
// fp64, so that the winner is the same on every machine unless two arrive within its rounding.
FASTINFER_HOST_DEVICE inline double arrival(const TokenNoise& noise, int32_t token, BlockWord word, double weight,
                                            double latest) {
  const double bound = latest * weight;
  if (least_noise_bound(word) > bound) return INFINITY;
  double own = exponential(least_noise_bound(word) * kNoiseBlock) / kNoiseBlock;
  if (static_cast<int32_t>(word % kNoiseBlock) != token % kNoiseBlock) {
    const double u = noise.excess_uniform(token);
    if (own + u > bound) return INFINITY;
    own += exponential(u);
  }
  return own / weight;
}

// The first to arrive so far; of those that arrive at the same time the smallest token.
struct Race {
  double time = INFINITY;
  int32_t token = INT32_MAX;

  FASTINFER_HOST_DEVICE void add(double other_time, int32_t other) {
    if (!(other_time < time || (other_time == time && other < token))) return;
    time = other_time;
    token = other;
  }
};

}  // namespace fastinfer
