// Integer products of packed weights: every 32-bit lane is a weight row and multiplies its four bytes by the four
// activations broadcast to all lanes.
//
// With AVX-512 VNNI, bytes by bytes is one instruction, and 16-bit activations are two bytes. Without it, products are
// added in pairs to 16 bits (vpmaddubsw), and pairs of those to 32 (vpmaddwd), whose second factor comes free. 16-bit
// activations meet weights widened to 16 bits (vpmaddwd alone); so do 8-bit weights, whose byte products overflow 16
// bits.
#pragma once

#include <bit>

#include "common/cpu/vec.h"

namespace fastinfer::cpu::FASTINFER_ISA {

inline constexpr int kRunInputs = 16;             // inputs that share a scale of 8-bit activations
inline constexpr int kRunSteps = kRunInputs / 4;  // vectors of four inputs

template <class T>
FASTINFER_INLINE i32v broadcast_word(const T* p) {
  int32_t word;
  std::memcpy(&word, p, sizeof(word));
  return i32v{} + word;
}

FASTINFER_INLINE u8v low_nibbles(u8v v) {
  return v & 0x0f;
}

FASTINFER_INLINE u8v high_nibbles(u8v v) {
  return (u8v)((u16v)v >> 4) & 0x0f;
}

// The weights of a run.
struct RunBytes {
  u8v step[kRunSteps];
};

#if !defined(FASTINFER_AVX2)

// A call, because the compiler takes minutes over many inlined copies of it.
__attribute__((noinline)) inline u8v shuffle_bytes(u8v v, u8v index) {
  u8v out;
  for (size_t i = 0; i < sizeof(v); ++i) out[i] = index[i] < 128 ? v[i / 16 * 16 + index[i] % 16] : 0;
  return out;
}

#endif

#if defined(FASTINFER_AVX512_VNNI)

// Runs of weights 0..255 with x in kParts rows of bytes: x itself, or x / 128 rounded down and the remainder, 0..127.
// start() is what the sum of a part's products begins with: it is shifted by 7 bits from the first part to the second.
template <int kBits>
struct ByteRun;

template <>
struct ByteRun<8> {
  using X = int8_t;
  static constexpr int kParts = 1;
  static constexpr int kMultipliers = 2;

  // |dot| <= 16 * 255 * 128 < 2^22: a sum that starts with the bits of 1.5 * 2^23, where the last place is 1, ends with
  // those of 1.5 * 2^23 + dot in fp32, without a conversion. Both starts are taken off with the first run's product,
  // which this rounds by 0.75 of a unit of the second's dot at most. (Rounding its activations
  // costs some 10 with 4-bit weights, by arithmetic.)
  static constexpr float kOffset = 12582912.0f;

  struct Multipliers {
    float values[2], bias;
  };

  static Multipliers multipliers(const int32_t* m, const int32_t*) {
    return {{static_cast<float>(m[0]), static_cast<float>(m[1])}, static_cast<float>(m[0] + m[1]) * -kOffset};
  }

  FASTINFER_INLINE static i32v start(const Multipliers&, int, int, i32v) {
    return i32v{} + std::bit_cast<int32_t>(kOffset);
  }

  FASTINFER_INLINE static f32v add_multiplied(const Multipliers& m, int run, i32v dot, f32v before) {
    return fused_multiply_add((f32v)dot, broadcast(m.values[run]), run == 0 ? broadcast(m.bias) : before);
  }
};

template <>
struct ByteRun<16> {
  using X = int8_t;
  static constexpr int kParts = 2;
  static constexpr int kMultipliers = 1;

  struct Multipliers {
    float value;
  };

  static Multipliers multipliers(const int32_t* m, const int32_t*) {
    return {static_cast<float>(m[0])};
  }

  FASTINFER_INLINE static i32v start(const Multipliers&, int, int part, i32v before) {
    return part == 0 ? i32v{} : before << 7;
  }

  // |dot| <= 32 * 255 * 8191 < 2^26 is converted.
  FASTINFER_INLINE static f32v add_multiplied(const Multipliers& m, int, i32v dot, f32v) {
    return to_f32(dot) * m.value;
  }
};

// The same runs where 0 stands for -kZero, and no minimum adds this up: the difference, -kZero * (sum of x), is in the
// start of their sums. |dot| stays below 2^22 on the way.
template <int kZero>
struct CentredByteRun : ByteRun<8> {
  struct Multipliers : ByteRun<8>::Multipliers {
    int32_t starts[2];
  };

  static Multipliers multipliers(const int32_t* m, const int32_t* sums) {
    const int32_t offset = std::bit_cast<int32_t>(kOffset);
    return {ByteRun<8>::multipliers(m, sums), {offset - kZero * sums[0], offset - kZero * sums[1]}};
  }

  FASTINFER_INLINE static i32v start(const Multipliers& m, int run, int, i32v) {
    return i32v{} + m.starts[run];
  }
};

// Runs with a scale of their own, of weights 0..63 that stand for -32..31. The difference, -32 * (sum of x), is in the
// start of their sums, or in the bias of their multipliers.
template <int kBits>
struct OffsetByteRun;

template <>
struct OffsetByteRun<8> {
  using X = int8_t;
  static constexpr int kParts = 1;
  static constexpr int kMultipliers = 2;
  static constexpr float kOffset = ByteRun<8>::kOffset;

  struct Multipliers {
    float values[2], biases[2];
    int32_t starts[2];
  };

  static Multipliers multipliers(const int32_t* m, const int32_t* sums) {
    const auto first = static_cast<float>(m[0]), second = static_cast<float>(m[1]);
    const int32_t offset = std::bit_cast<int32_t>(kOffset);
    return {{first, second}, {first * -kOffset, second * -kOffset}, {offset - 32 * sums[0], offset - 32 * sums[1]}};
  }

  FASTINFER_INLINE static i32v start(const Multipliers& m, int run, int, i32v) {
    return i32v{} + m.starts[run];
  }

  FASTINFER_INLINE static f32v add_multiplied(const Multipliers& m, int run, i32v dot, f32v) {
    return fused_multiply_add((f32v)dot, broadcast(m.values[run]), broadcast(m.biases[run]));
  }
};

template <>
struct OffsetByteRun<16> {
  using X = int8_t;
  static constexpr int kParts = 2;
  static constexpr int kMultipliers = 2;

  struct Multipliers {
    float values[2], biases[2];
  };

  static Multipliers multipliers(const int32_t* m, const int32_t* sums) {
    const auto first = static_cast<float>(m[0]), second = static_cast<float>(m[1]);
    return {{first, second}, {first * static_cast<float>(-32 * sums[0]), second * static_cast<float>(-32 * sums[1])}};
  }

  FASTINFER_INLINE static i32v start(const Multipliers&, int, int part, i32v before) {
    return part == 0 ? i32v{} : before << 7;
  }

  // The fused instruction adds the bias for nothing.
  FASTINFER_INLINE static f32v add_multiplied(const Multipliers& m, int run, i32v dot, f32v) {
    return fused_multiply_add(to_f32(dot), broadcast(m.values[run]), broadcast(m.biases[run]));
  }
};

#else

#if !defined(FASTINFER_AVX2)

FASTINFER_INLINE i16v maddubs(u8v a, i8v b) {
  const i16v a_even = (i16v)((u16v)a & 0xff), a_odd = (i16v)((u16v)a >> 8);
  const i16v b_even = (i16v)((u16v)b << 8) >> 8, b_odd = (i16v)b >> 8;
  return a_even * b_even + a_odd * b_odd;
}

FASTINFER_INLINE i32v madd(i16v a, i16v b) {
  const i32v a_even = (i32v)((u32v)a << 16) >> 16, b_even = (i32v)((u32v)b << 16) >> 16;
  return a_even * b_even + ((i32v)a >> 16) * ((i32v)b >> 16);
}

#endif

// Runs of weights ready to be multiplied, by x of the type X in kParts rows, and by integers, kMultipliers for the two
// runs of a block.

struct PairRun {  // 0..32: four pairs fit 16 bits, 4 * 2 * 32 * 127 = 32,512
  using X = int8_t;
  static constexpr int kParts = 1;
  static constexpr int kMultipliers = 2;
  RunBytes w;

  struct Multipliers {
    int16_t pairs[2][2];
  };

  static Multipliers multipliers(const int32_t* m, const int32_t*) {
    const auto first = static_cast<int16_t>(m[0]), second = static_cast<int16_t>(m[1]);
    return {{{first, first}, {second, second}}};
  }

  FASTINFER_INLINE i16v pairs(const int8_t* x) const {
    i16v sum = maddubs(w.step[0], (i8v)broadcast_word(x));
#pragma GCC unroll 4
    for (int s = 1; s < kRunSteps; ++s) sum += maddubs(w.step[s], (i8v)broadcast_word(x + 4 * s));
    return sum;
  }
};

// 0..63 that stand for -32..31, with a scale of their own: two pairs fit 16 bits, 2 * 2 * 63 * 127 = 32,004. The
// difference, -32 * multiplier * (sum of x), is in the start of the sums, which stay below 2^30.
struct OffsetPairRun {
  using X = int8_t;
  static constexpr int kParts = 1;
  static constexpr int kMultipliers = 2;
  RunBytes w;

  struct Multipliers {
    int16_t pairs[2][2];
    int32_t starts[2];
  };

  static Multipliers multipliers(const int32_t* m, const int32_t* sums) {
    const auto first = static_cast<int16_t>(m[0]), second = static_cast<int16_t>(m[1]);
    return {{{first, first}, {second, second}}, {-32 * m[0] * sums[0], -32 * m[1] * sums[1]}};
  }

  FASTINFER_INLINE i16v pairs(const int8_t* x, int step) const {
    return maddubs(w.step[step], (i8v)broadcast_word(x + 4 * step)) +
           maddubs(w.step[step + 1], (i8v)broadcast_word(x + 4 * step + 4));
  }
};

// Weights as 16 bits, for activations of kBits. Inputs 0, 2, 1, 3 of x lie in this order, as even and odd bytes are
// taken apart without shuffles.
template <int kBits, int kMultipliers_ = kBits == 8 ? 2 : 1>
struct WideRun {
  using X = int16_t;
  static constexpr int kParts = 1;
  static constexpr int kMultipliers = kMultipliers_;
  i16v even[kRunSteps], odd[kRunSteps];

  struct Multipliers {
    float values[kMultipliers];
  };

  static Multipliers multipliers(const int32_t* m, const int32_t*) {
    Multipliers result;
    for (int i = 0; i < kMultipliers; ++i) result.values[i] = static_cast<float>(m[i]);
    return result;
  }

  FASTINFER_INLINE static WideRun of_unsigned(const RunBytes& bytes) {
    WideRun run;
#pragma GCC unroll 4
    for (int s = 0; s < kRunSteps; ++s) {
      run.even[s] = (i16v)((u16v)bytes.step[s] & 0xff);
      run.odd[s] = (i16v)((u16v)bytes.step[s] >> 8);
    }
    return run;
  }

  FASTINFER_INLINE static WideRun of_signed(const RunBytes& bytes) {
    WideRun run;
#pragma GCC unroll 4
    for (int s = 0; s < kRunSteps; ++s) {
      run.even[s] = (i16v)((u16v)bytes.step[s] << 8) >> 8;
      run.odd[s] = (i16v)bytes.step[s] >> 8;
    }
    return run;
  }

  FASTINFER_INLINE i32v dot(const int16_t* x) const {
    i32v sum = madd(even[0], (i16v)broadcast_word(x)) + madd(odd[0], (i16v)broadcast_word(x + 2));
#pragma GCC unroll 4
    for (int s = 1; s < kRunSteps; ++s) {
      sum += madd(even[s], (i16v)broadcast_word(x + 4 * s)) + madd(odd[s], (i16v)broadcast_word(x + 4 * s + 2));
    }
    return sum;
  }
};

// Sums the products of a block's runs with one row of x, times their multipliers: each in fp32, or both at the end if
// they share one, or, where pairs are multiplied once more on their way to 32 bits, in integers by a multiplier instead
// of the ones that would only add.
template <class Run>
class ScaledDot;

template <int kBits>
class ScaledDot<WideRun<kBits, 2> > {
 public:
  using Run = WideRun<kBits, 2>;

  FASTINFER_INLINE void add(const Run& run, const int16_t* x, const typename Run::Multipliers& multipliers, int index) {
    sum_ += to_f32(run.dot(x)) * multipliers.values[index];
  }

  FASTINFER_INLINE f32v sum(const typename Run::Multipliers&) const {
    return sum_;
  }

 private:
  f32v sum_{};
};

template <>
class ScaledDot<WideRun<16> > {
 public:
  FASTINFER_INLINE void add(const WideRun<16>& run, const int16_t* x, const WideRun<16>::Multipliers&, int) {
    sum_ += run.dot(x);
  }

  FASTINFER_INLINE f32v sum(const WideRun<16>::Multipliers& multipliers) const {
    return to_f32(sum_) * multipliers.values[0];
  }

 private:
  i32v sum_{};
};

template <>
class ScaledDot<PairRun> {
 public:
  FASTINFER_INLINE void add(const PairRun& run, const int8_t* x, const PairRun::Multipliers& multipliers, int index) {
    sum_ += madd(run.pairs(x), (i16v)broadcast_word(multipliers.pairs[index]));
  }

  FASTINFER_INLINE f32v sum(const PairRun::Multipliers&) const {
    return to_f32(sum_);
  }

 private:
  i32v sum_{};
};

template <>
class ScaledDot<OffsetPairRun> {
 public:
  FASTINFER_INLINE void add(const OffsetPairRun& run, const int8_t* x, const OffsetPairRun::Multipliers& multipliers,
                            int index) {
    const auto multiplier = (i16v)broadcast_word(multipliers.pairs[index]);
    sum_ += madd(run.pairs(x, 0), multiplier) + madd(run.pairs(x, 2), multiplier) + multipliers.starts[index];
  }

  FASTINFER_INLINE f32v sum(const OffsetPairRun::Multipliers&) const {
    return to_f32(sum_);
  }

 private:
  i32v sum_{};
};

#endif

}  // namespace fastinfer::cpu::FASTINFER_ISA
