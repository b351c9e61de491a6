// From the codes of a quantized cache to the 16-bit floats that paged attention multiplies. No element meets its scale
// but a key of four bits: those of keys multiply the logits, those of values the probabilities.
//
// Keys become fp16 whatever the queries are, since fp16 holds every code, and every key of four bits, exactly; bf16
// queries become fp16 by a power of two for each row (see paged_attention_queries_cuda.h). Values of four bits become
// fp16, too, which has room for all that their scales and minima can say. Those of eight bits become T: their scales
// have no bound that fp16 knows.
#pragma once

#include <type_traits>

#include "attention/kv_int4_cuda.h"
#include "attention/paged_attention.h"
#include "common/cuda/dtype.h"
#include "common/cuda/ptx.h"

namespace fastinfer::cuda {

// The 16-bit type of the products Q K^T.
template <class T, CacheQuantization kKind>
using KeyProduct = std::conditional_t<kKind == CacheQuantization::kNone, T, __half>;

// That of the products P V.
template <class T, CacheQuantization kKind>
using ValueProduct = std::conditional_t<kKind == CacheQuantization::kInt4, __half, T>;

// e4m3 in fp16 keeps its exponent as it is and becomes 2^8 times smaller. fp16 probabilities are made larger, so that
// times a small scale they stay normal numbers, but not so large that they overflow beside values that fp16 can hold.
template <class T, CacheQuantization kKind>
struct CodeFactors {
  static constexpr bool kSmall = kKind == CacheQuantization::kFp8 && std::is_same_v<T, __half>;
  static constexpr float kKey = kKind == CacheQuantization::kFp8 ? 256.0f : 1.0f;
  static constexpr float kProbability = kKind == CacheQuantization::kInt4   ? 4.0f
                                        : !std::is_same_v<T, __half>        ? 1.0f
                                        : kKind == CacheQuantization::kNone ? 1.0f
                                                                            : 64.0f;
  static constexpr float kResult = (kSmall ? 256.0f : 1.0f) / kProbability;
};

// Two e4m3 in the upper halves of a word's halves: a shift puts exponent and mantissa where T has them. bf16 mends the
// exponent's bias by a product, which also makes subnormals normal. (The one NaN of e4m3 becomes 480: a store that
// saturates never writes it.)
template <class T>
__device__ uint32_t spread_fp8(uint32_t spread) {
  if constexpr (std::is_same_v<T, __half>) return (spread & 0x80008000u) | (spread >> 1 & 0x3f803f80u);
  return mul2<T>((spread & 0x80008000u) | (spread >> 4 & 0x07f007f0u), 0x7b807b80u);  // 2^120
}

// Two int8 in the lower halves of a word's halves. fp16: 0x6400 | u is 1024 + u. bf16 has room for seven bits: 128 +
// the low ones, minus 128 or, with the sign, 256.
template <class T>
__device__ uint32_t spread_int8(uint32_t spread) {
  if constexpr (std::is_same_v<T, __half>) return sub2<T>((spread & 0x00ff00ffu) ^ 0x64806480u, 0x64806480u);
  return sub2<T>((spread & 0x007f007fu) | 0x43004300u, (spread & 0x00800080u) | 0x43004300u);
}

// Four codes of eight bits become two words: 0, 1 and 2, 3; or if kTransposed 0, 2 and 1, 3.
template <class T, CacheQuantization kKind, bool kTransposed>
__device__ void widen(uint32_t x, uint32_t (&out)[2]) {
  if constexpr (kKind == CacheQuantization::kFp8) {
    out[0] = spread_fp8<T>(kTransposed ? x << 8 : prmt(x, 0, 0x1404));
    out[1] = spread_fp8<T>(kTransposed ? x : prmt(x, 0, 0x3424));
  } else {
    out[0] = spread_int8<T>(kTransposed ? x : prmt(x, 0, 0x4140));
    out[1] = spread_int8<T>(kTransposed ? x >> 8 : prmt(x, 0, 0x4342));
  }
}

// Eight codes of four bits, the lower half's first, less kMinus, in fp16: word i is codes i and 4 + i. 0x6400 | q is
// 1024 + q, and with the next four bits 1024 + 16 q.
template <int kMinus>
__device__ void widen_int4_pairs(uint32_t x, uint32_t (&out)[4]) {
  static_assert(kMinus == 0 || kMinus == 8);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t y = i < 2 ? x : x >> 8;
    out[i] = i % 2 == 0 ? sub2<__half>((y & 0x000f000fu) | 0x64006400u, 0x64006400u + kMinus * 0x10001u)
                        : fma2<__half>((y & 0x00f000f0u) | 0x64006400u, 0x2c002c00u,  // / 16 - 64 - kMinus
                                       kMinus == 0 ? 0xd400d400u : 0xd480d480u);
  }
}

// Eight keys of one group, in the same order.
__device__ inline void widen_int4_keys(uint32_t x, uint32_t scale, uint32_t (&out)[4]) {
  const uint32_t factor = prmt(scale, 0, 0x1010), minimum = prmt(scale, 0, 0x3232);
  widen_int4_pairs<0>(x, out);
#pragma unroll
  for (uint32_t& pair : out) pair = fma2<__half>(pair, factor, minimum);
}

}  // namespace fastinfer::cuda
