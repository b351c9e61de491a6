// Dot products of bytes: every 32-bit lane multiplies its four weights by the four activations broadcast to all lanes.
#pragma once

#include "common/cpu/vec.h"

namespace fastinfer::cpu::FASTINFER_ISA {

FASTINFER_INLINE i8v broadcast4(const int8_t* p) {
  int32_t four;
  std::memcpy(&four, p, sizeof(four));
  return (i8v)(i32v{} + four);
}

FASTINFER_INLINE u8v low_nibbles(u8v v) {
  return v & 0x0f;
}

FASTINFER_INLINE u8v high_nibbles(u8v v) {
  return (u8v)((u16v)v >> 4) & 0x0f;
}

#if !defined(FASTINFER_AVX512_VNNI)

// Sums of neighbouring products, 16 bits wide: w[2i] a[2i] + w[2i+1] a[2i+1]. |w| <= 127 where w is signed.
FASTINFER_INLINE i16v multiply_pairs(u8v w, i8v a) {
#if defined(FASTINFER_AVX2)
  return maddubs(w, a);
#else
  const i16v w_even = (i16v)((u16v)w & 0xff), w_odd = (i16v)((u16v)w >> 8);
  const i16v a_even = (i16v)((u16v)a << 8) >> 8, a_odd = (i16v)a >> 8;
  return w_even * a_even + w_odd * a_odd;
#endif
}

FASTINFER_INLINE i32v add_pairs(i16v v) {
#if defined(FASTINFER_AVX2)
  return madd(v, i16v{} + 1);
#else
  return ((i32v)((u32v)v << 16) >> 16) + ((i32v)v >> 16);
#endif
}

#endif

// 4-bit weights 0..15 by activations -127..127, over at most 32 inputs (eight additions).
class Int4Dot {
 public:
  FASTINFER_INLINE void add(u8v w, i8v a) {
#if defined(FASTINFER_AVX512_VNNI)
    sum_ = dpbusd(sum_, w, a);
#else
    pairs_ += multiply_pairs(w, a);  // no overflow: 8 * 2 * 15 * 127 = 30,480
#endif
  }

  FASTINFER_INLINE i32v sum() const {
#if defined(FASTINFER_AVX512_VNNI)
    return sum_;
#else
    return add_pairs(pairs_);
#endif
  }

 private:
#if defined(FASTINFER_AVX512_VNNI)
  i32v sum_{};
#else
  i16v pairs_{};
#endif
};

// 8-bit weights -128..127 by activations -127..127 that add up to `total`.
class Int8Dot {
 public:
  FASTINFER_INLINE void add(i8v w, i8v a) {
#if defined(FASTINFER_AVX512_VNNI)
    // The instruction wants unsigned weights: w + 128, taken back in sum().
    sum_ = dpbusd(sum_, (u8v)w ^ 0x80, a);
#elif defined(FASTINFER_AVX2)
    // |w| by a with w's sign: at most 2 * 128 * 127 = 32,512 a pair, so that 16 bits hold one addition, not two.
    const u8v magnitude = (u8v)(w < 0 ? -w : w);
    sum_ += add_pairs(multiply_pairs(magnitude, sign(a, w)));
#else
    const i16v w_even = (i16v)((u16v)w << 8) >> 8, w_odd = (i16v)w >> 8;
    const i16v a_even = (i16v)((u16v)a << 8) >> 8, a_odd = (i16v)a >> 8;
    sum_ += add_pairs(w_even * a_even + w_odd * a_odd);
#endif
  }

  FASTINFER_INLINE i32v sum([[maybe_unused]] int32_t total) const {
#if defined(FASTINFER_AVX512_VNNI)
    return sum_ - 128 * total;
#else
    return sum_;
#endif
  }

 private:
  i32v sum_{};
};

}  // namespace fastinfer::cpu::FASTINFER_ISA
