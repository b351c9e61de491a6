// The rules that the CPU's and the GPU's sampler share: how a logit is modified, and which tokens the filters keep.
#pragma once

#include <cfloat>
#include <cmath>

#include "common/dtype.h"
#include "sampling/sample.h"

namespace fastinfer {

// Below this, 1 / temperature is no longer a finite number, and the distribution has long been a single peak.
inline constexpr float kGreedyTemperature = 1e-30f;

// Weights exp((z - maximum) / temperature) below e^-87.5 are less than the smallest normal number: 0.
inline constexpr float kLeastExponent = -87.5f;

inline constexpr int kMaxLogprobs = 20;
inline constexpr int64_t kMaxVocab = int64_t{1} << 24;  // so that fp32 counts tokens exactly

FASTINFER_HOST_DEVICE inline bool bit_of(const int32_t* words, int64_t token) {
  return static_cast<uint32_t>(words[token / 32]) >> (token % 32) & 1;
}

// The logit z of a token that the output has `count` times.
FASTINFER_HOST_DEVICE inline float penalised(float z, bool in_prompt, int32_t count, const float* penalties) {
  if (in_prompt || count > 0) z = z > 0.0f ? z / penalties[0] : z * penalties[0];
  if (count > 0) z -= penalties[1] + penalties[2] * static_cast<float>(count);
  return z;
}

// A row's biases, as far as they exist.
struct BiasRange {
  int64_t begin, end;

  FASTINFER_HOST_DEVICE BiasRange(const SampleParams& p, int64_t row)
      : begin(p.bias_start[row] > 0 ? p.bias_start[row] : 0),
        end(p.bias_start[row + 1] < p.num_biases ? p.bias_start[row + 1] : p.num_biases) {}
};

FASTINFER_HOST_DEVICE inline bool makes_sense(const SampleParams& p, int64_t bias) {
  return p.bias_tokens[bias] >= 0 && p.bias_tokens[bias] < p.vocab && p.bias_values[bias] < INFINITY;
}

// The last token that is kept, in the order of falling logits, of equals the smaller id first.
struct LastKept {
  float z;
  int32_t token;

  FASTINFER_HOST_DEVICE bool keeps(float other, int32_t other_token) const {
    return other > z || (other == z && other_token <= token);
  }
};

// The logit at which min-p cuts, or else at which weights become 0. It is finite and never above the maximum.
FASTINFER_HOST_DEVICE inline float lowest_kept(float maximum, float temperature, float min_p) {
  const double exponent = min_p > 0.0f ? std::log(static_cast<double>(min_p)) : static_cast<double>(kLeastExponent);
  const double z = static_cast<double>(maximum) + static_cast<double>(temperature) * exponent;
  return z < -FLT_MAX ? -FLT_MAX : z > maximum ? maximum : static_cast<float>(z);
}

// A token's weight in the race, relative to the maximum's.
FASTINFER_HOST_DEVICE inline double race_weight(float z, float maximum, float temperature) {
  return std::exp((static_cast<double>(z) - static_cast<double>(maximum)) / static_cast<double>(temperature));
}

// Unsigned integers in the order of the floats (but for NaN), and back.
FASTINFER_HOST_DEVICE inline uint32_t ordered_bits(float z) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, z + 0.0f);  // -0 equals 0
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

FASTINFER_HOST_DEVICE inline float from_ordered_bits(uint32_t bits) {
  return __builtin_bit_cast(float, bits & 0x80000000u ? bits & 0x7fffffffu : ~bits);
}

}  // namespace fastinfer
