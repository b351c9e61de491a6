// The race (race.h) between tokens whose logits the threads of a block hold. Noise in fp64 is slow, so bounds in fp32
// come first. The least noise of each block of 64 tokens, with the token that has it, gives a time by which somebody
// has arrived, and then a time before which nobody of a quad can arrive. A handful of tokens is left, whose times are
// computed exactly: the winner does not depend on the bounds.
#pragma once

#include "sampling/race.h"
#include "sampling/sample_row_cuda.h"

namespace fastinfer::cuda {

inline constexpr float kBoundMargin = 1.001f;  // for the rounding of bounds and weights in fp32

__device__ inline TokenNoise noise_of_row(const SampleParams& p) {
  return {static_cast<uint64_t>(p.seeds[blockIdx.x]), static_cast<uint64_t>(p.positions[blockIdx.x])};
}

// Computed rarely. A call, which reads again what it needs, keeps that out of the registers of the loops around it.
__device__ __attribute__((noinline)) inline double arrival(const SampleParams& p, int token, BlockWord word, float z,
                                                           float maximum, double latest) {
  const float temperature = fminf(p.temperature[blockIdx.x], FLT_MAX);
  return arrival(noise_of_row(p), token, word, race_weight(z, maximum, temperature), latest);
}

__device__ inline float least_noise_bound_fp32(BlockWord word) {
  return (static_cast<float>(word >> 6) + 0.5f) * (0x1p-26f / kNoiseBlock);
}

__device__ inline bool has_least_noise(int token, BlockWord word) {
  return static_cast<int>(word % kNoiseBlock) == token % kNoiseBlock;
}

// -log(1 - u) is more than u, and at most u / (1 - u).
__device__ inline float most_exponential(float u) {
  return u / (1.0f - u);
}

// No less than the noise of a token.
__device__ inline float most_noise(const TokenNoise& noise, int token, BlockWord word) {
  float most = most_exponential(least_noise_bound_fp32(word) * kNoiseBlock) / kNoiseBlock;
  if (!has_least_noise(token, word)) most += most_exponential(static_cast<float>(noise.excess_uniform(token)));
  return most;
}

// Lets those tokens of a quad race that can arrive by `latest`.
__device__ inline void race_quad(const SampleParams& p, const SampleRow& row, int first, BlockWord word, LastKept last,
                                 float latest, Race& race) {
  const Quad quad = row(first);
  const TokenNoise noise = noise_of_row(p);
  const Philox excess = noise.excess_words(first);
#pragma unroll 1
  for (int j = 0; j < kQuad; ++j) {
    const float z = quad.values[j];
    if (!last.keeps(z, first + j)) continue;
    float least = least_noise_bound_fp32(word);
    if (!has_least_noise(first + j, word)) least += static_cast<float>(excess.word(j)) * 0x1p-32f;
    if (least <= latest * row.weight(z)) {
      race.add(arrival(p, first + j, word, z, row.maximum, race.time), first + j);
    }
  }
}

// Lets those of the held tokens race that are kept.
template <int kCount>
__device__ void race_held(SampleBlock& block, const SampleParams& p, const SampleRow& row,
                          const HeldQuads<kCount>& held, LastKept last, Race& race) {
  const int begin = held.begin, end = min(begin + held.tokens(), row.end);
  const int thread = static_cast<int>(threadIdx.x);
  auto* const words = reinterpret_cast<BlockWord*>(block.candidates());
  __syncthreads();  // nobody reads candidates or earlier words any more
  if (begin + thread * kNoiseGroup < end) {
    const Philox group = noise_of_row(p).block_words(begin / kNoiseGroup + thread);
    for (int i = 0; i < 4; ++i) words[4 * thread + i] = group.words[i];
  }
  __syncthreads();

  // Somebody arrives by `latest`: the tokens with the least noise, or the likeliest. At most half of the threads have a
  // block of noise.
  int early = thread == static_cast<int>(blockDim.x) - 1 ? row.likeliest : end;
  if (begin + thread * kNoiseBlock < end) {
    early = begin + thread * kNoiseBlock + static_cast<int>(words[thread] % kNoiseBlock);
  }
  float latest = static_cast<float>(race.time);
  if (early >= begin && early < end) {
    const float z = __ldcg(row.z + early);
    const BlockWord word = words[(early - begin) / kNoiseBlock];
    if (last.keeps(z, early)) latest = fminf(latest, most_noise(noise_of_row(p), early, word) / row.weight(z));
  }
  latest = block.minimum(latest) * kBoundMargin;

  unsigned possible = 0;  // bit i: quads[i] may have the winner
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float top = top_of(held.quads[i]);
    if (top < last.z) continue;
    const float least = least_noise_bound_fp32(words[(held.token(i) - begin) / kNoiseBlock]);
    if (least <= latest * row.weight(top)) possible |= 1u << i;
  }
  for (; possible != 0; possible &= possible - 1) {
    const int first = held.token(__ffs(static_cast<int>(possible)) - 1);
    race_quad(p, row, first, words[(first - begin) / kNoiseBlock], last, latest, race);
  }
}

}  // namespace fastinfer::cuda
