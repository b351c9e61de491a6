// Readers of the blocks of a GGUF file. Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h.
//
// A reader unpacks one block to integers, and to a scale and perhaps a minimum per group of 32. It returns false if one
// of the numbers that it computes does not fit into the type `Scale`. Numbers that the file holds are copied.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "common/dtype.h"

namespace fastinfer::cpu {

constexpr float kLargestFp16 = 65504.0f;

inline float half(const uint8_t* bytes) {
  Float16 number;
  std::memcpy(&number, bytes, 2);
  return to_float(number);
}

inline void copy_half(const uint8_t* bytes, Float16* out) {
  std::memcpy(out, bytes, 2);
}
inline void copy_half(const uint8_t* bytes, float* out) {
  *out = half(bytes);
}

inline bool store(float number, Float16* out) {
  *out = from_float<Float16>(number);
  return std::abs(number) <= kLargestFp16;  // false for a NaN
}
inline bool store(float number, float* out) {
  *out = number;
  return true;
}

// Each run of bytes gives the values in its lowest kBits bits, then those in the next higher bits, and so on. They are
// shifted left, and added to what is in q.
template <int kBits, int kRun>
void add_fields(const uint8_t* bytes, int count, int shift, uint8_t* q) {
  for (int begin = 0; begin < count; begin += kRun) {
    for (int bit = 0; bit < 8; bit += kBits, q += kRun) {
      for (int i = 0; i < kRun; ++i) {
        q[i] = static_cast<uint8_t>(q[i] | (bytes[begin + i] >> bit & ((1 << kBits) - 1)) << shift);
      }
    }
  }
}

// Bit i of a byte becomes the highest bit of byte i.
inline uint64_t spread_bits(uint8_t bits) {
  const uint64_t picked = bits * 0x0101010101010101u & 0x8040201008040201u;
  return (picked + 0x7f7f7f7f7f7f7f7fu) & 0x8080808080808080u;
}

template <int kRun>
void nibbles(const uint8_t* bytes, int count, uint8_t* q) {
  for (int begin = 0; begin < count; begin += kRun, q += 2 * kRun) {
    for (int i = 0; i < kRun; ++i) {
      q[i] = bytes[begin + i] & 15;
      q[kRun + i] = bytes[begin + i] >> 4;
    }
  }
}

// ---- Blocks of 32: a scale, perhaps a minimum, perhaps the fifth bits, and the integers ----

// Q4_0, Q4_1 and IQ4_NL.
template <bool kMins>
struct FourBits {
  static constexpr int kInputs = 32, kBytes = kMins ? 20 : 18, kBits = 4;
  static constexpr bool kHasMins = kMins, kGroupsOf16 = false;
  template <class Scale>
  static bool read(const uint8_t* block, uint8_t* q, Scale* scale, Scale* min) {
    copy_half(block, scale);
    if constexpr (kMins) copy_half(block + 2, min);
    nibbles<16>(block + kBytes - 16, 16, q);
    return true;
  }
};

// Q5_0, whose integers are -16..15, and Q5_1, whose integers are 0..31.
template <bool kMins>
struct FiveBits {
  static constexpr int kInputs = 32, kBytes = kMins ? 24 : 22, kBits = 8;
  static constexpr bool kHasMins = kMins, kGroupsOf16 = false;
  template <class Scale>
  static bool read(const uint8_t* block, uint8_t* q, Scale* scale, Scale* min) {
    FourBits<false>::read(block + kBytes - 18, q, scale, min);
    copy_half(block, scale);
    if constexpr (kMins) copy_half(block + 2, min);
    for (int byte = 0; byte < 4; ++byte) {
      uint64_t values;
      std::memcpy(&values, q + 8 * byte, 8);
      values |= spread_bits(block[kBytes - 20 + byte]) >> 3;
      std::memcpy(q + 8 * byte, &values, 8);
    }
    for (int i = 0; i < 32 && !kMins; ++i) q[i] = static_cast<uint8_t>(q[i] - 16);
    return true;
  }
};

// Indices into a look-up table of the numbers of e2m1 times two, and an exponent e; the scale is 2^(e - 128).
struct MXFP4 {
  static constexpr int kInputs = 32, kBytes = 17, kBits = 4;
  static constexpr bool kHasMins = false, kGroupsOf16 = false;
  template <class Scale>
  static bool read(const uint8_t* block, uint8_t* q, Scale* scale, Scale*) {
    const float number = std::ldexp(1.0f, block[0] - 128);
    nibbles<16>(block + 1, 16, q);
    return store(number, scale) && to_float(*scale) == number;  // fp16 makes 0 of the smallest powers of two
  }
};

// ---- Blocks of one scale: as if each group of 32 had it ----

template <class Scale>
void repeat_half(const uint8_t* bytes, int groups, Scale* scales) {
  for (int group = 0; group < groups; ++group) copy_half(bytes, scales + group);
}

// -1 or 1; a weight without minimums has an offset of 8.
struct Q1_0 {
  static constexpr int kInputs = 128, kBytes = 18, kBits = 4;
  static constexpr bool kHasMins = false, kGroupsOf16 = false;
  template <class Scale>
  static bool read(const uint8_t* block, uint8_t* q, Scale* scales, Scale*) {
    repeat_half(block, 4, scales);
    for (int byte = 0; byte < 16; ++byte) {
      const uint64_t values = (spread_bits(block[2 + byte]) >> 6) + 0x0707070707070707u;
      std::memcpy(q + 8 * byte, &values, 8);
    }
    return true;
  }
};

// -1, 0 and 1. A byte has five digits to the base of 3, the highest first, as a fraction of 256 that is rounded up.
struct TQ1_0 {
  static constexpr int kInputs = 256, kBytes = 54, kBits = 4;
  static constexpr bool kHasMins = false, kGroupsOf16 = false;
  template <class Scale>
  static bool read(const uint8_t* block, uint8_t* q, Scale* scales, Scale*) {
    repeat_half(block + 52, 8, scales);
    q = digits(block, 32, 5, q);
    q = digits(block + 32, 16, 5, q);
    digits(block + 48, 4, 4, q);
    return true;
  }

  static uint8_t* digits(const uint8_t* bytes, int run, int count, uint8_t* q) {
    for (int digit = 0, power = 1; digit < count; ++digit, power *= 3, q += run) {
      for (int i = 0; i < run; ++i) q[i] = static_cast<uint8_t>(7 + ((bytes[i] * power & 255) * 3 >> 8));
    }
    return q;
  }
};

// -1, 0, 1 and 2, in two bits each: TQ2_0, whose scale is last, and Q2_0, where neighbours are in one byte.
template <int kInputsOfBlock, int kRun, bool kScaleLast>
struct TwoBits {
  static constexpr int kInputs = kInputsOfBlock, kBytes = 2 + kInputs / 4, kBits = 4;
  static constexpr bool kHasMins = false, kGroupsOf16 = false;
  template <class Scale>
  static bool read(const uint8_t* block, uint8_t* q, Scale* scales, Scale*) {
    repeat_half(block + (kScaleLast ? kBytes - 2 : 0), kInputs / 32, scales);
    std::memset(q, 0, kInputs);
    add_fields<2, kRun>(block + (kScaleLast ? 0 : 2), kInputs / 4, 0, q);
    for (int i = 0; i < kInputs; ++i) q[i] = static_cast<uint8_t>(q[i] + 7);
    return true;
  }
};
using TQ2_0 = TwoBits<256, 32, true>;
using Q2_0 = TwoBits<64, 1, false>;

// Indices into a look-up table in groups of 32, each with the scale d * (s - 32); the six bits of s lie in two places.
struct IQ4_XS {
  static constexpr int kInputs = 256, kBytes = 136, kBits = 4;
  static constexpr bool kHasMins = false, kGroupsOf16 = false;
  template <class Scale>
  static bool read(const uint8_t* block, uint8_t* q, Scale* scales, Scale*) {
    const float d = half(block);
    uint16_t high;
    std::memcpy(&high, block + 2, 2);
    bool fits = true;
    for (int group = 0; group < 8; ++group) {
      const int low = block[4 + group / 2] >> group % 2 * 4 & 15, s = low | (high >> 2 * group & 3) << 4;
      fits &= store(d * static_cast<float>(s - 32), scales + group);
      nibbles<16>(block + 8 + 16 * group, 16, q + 32 * group);
    }
    return fits;
  }
};

struct Q8_0 {
  static constexpr int kInputs = 32, kBytes = 34, kBits = 8;
  static constexpr bool kHasMins = false, kGroupsOf16 = false;
  template <class Scale>
  static bool read(const uint8_t* block, uint8_t* q, Scale* scale, Scale*) {
    copy_half(block, scale);
    std::memcpy(q, block + 2, 32);
    return true;
  }
};

// ---- Blocks of 256 in groups of 32: d * scale, -dmin * minimum, with six bits each ----

inline void six_bits_of_groups_of_32(const uint8_t* block, int8_t* scales, int8_t* mins) {
  const uint8_t *low = block + 4, *high = block + 8, *shared = block + 12;
  for (int i = 0; i < 4; ++i) {
    scales[i] = static_cast<int8_t>(low[i] & 63);
    scales[4 + i] = static_cast<int8_t>((shared[i] & 15) | (low[i] >> 2 & 48));
    mins[i] = static_cast<int8_t>(high[i] & 63);
    mins[4 + i] = static_cast<int8_t>(shared[i] >> 4 | (high[i] >> 2 & 48));
  }
}

template <class Scale>
bool read_groups_of_32(const uint8_t* block, Scale* scales, Scale* mins) {
  const float d = half(block), dmin = half(block + 2);
  int8_t six_bit_scales[8], six_bit_mins[8];
  six_bits_of_groups_of_32(block, six_bit_scales, six_bit_mins);
  bool fits = true;
  for (int i = 0; i < 8; ++i) {
    fits &= store(d * static_cast<float>(six_bit_scales[i]), scales + i);
    fits &= store(-dmin * static_cast<float>(six_bit_mins[i]), mins + i);
  }
  return fits;
}

// Scales or minimums of a block as they are stored: an integer for each group, times an fp16.
struct TwoLevelNumbers {
  Float16 factor;
  int8_t integers[16];
};

inline void two_level_groups_of_32(const uint8_t* block, TwoLevelNumbers* scales, TwoLevelNumbers* mins) {
  six_bits_of_groups_of_32(block, scales->integers, mins->integers);
  copy_half(block, &scales->factor);
  copy_half(block + 2, &mins->factor);
  mins->factor.bits ^= 0x8000;
}

struct Q4_K {
  static constexpr int kInputs = 256, kBytes = 144, kBits = 4;
  static constexpr bool kHasMins = true, kGroupsOf16 = false;
  template <class Scale>
  static bool read(const uint8_t* block, uint8_t* q, Scale* scales, Scale* mins) {
    nibbles<32>(block + 16, 128, q);
    return read_groups_of_32(block, scales, mins);
  }

  static constexpr int kTwoLevelBits = 4, kTwoLevelGroups = 8;
  static void read_two_level(const uint8_t* block, uint8_t* q, TwoLevelNumbers* scales, TwoLevelNumbers* mins) {
    nibbles<32>(block + 16, 128, q);
    two_level_groups_of_32(block, scales, mins);
  }
};

struct Q5_K {
  static constexpr int kInputs = 256, kBytes = 176, kBits = 8;
  static constexpr bool kHasMins = true, kGroupsOf16 = false;
  template <class Scale>
  static bool read(const uint8_t* block, uint8_t* q, Scale* scales, Scale* mins) {
    read_integers(block, q);
    return read_groups_of_32(block, scales, mins);
  }

  static void read_integers(const uint8_t* block, uint8_t* q) {
    nibbles<32>(block + 48, 128, q);
    add_fields<1, 32>(block + 16, 32, 4, q);
  }

  static constexpr int kTwoLevelBits = 5, kTwoLevelGroups = 8;
  static void read_two_level(const uint8_t* block, uint8_t* q, TwoLevelNumbers* scales, TwoLevelNumbers* mins) {
    read_integers(block, q);
    two_level_groups_of_32(block, scales, mins);
  }
};

// ---- Blocks of 256 in groups of 16 ----

struct GroupsOf16 {
  int8_t q[256];
  float scales[16];
  float mins[16];
};

// kSymmetric: whether the negative of every integer is one, too.
struct Q6_K {
  static constexpr int kBytes = 210;
  static constexpr float kLargest = 32.0f;  // magnitude of an integer
  static constexpr bool kMins = false, kSymmetric = false;
  static void read_groups(const uint8_t* block, GroupsOf16* to) {
    read_integers(block, reinterpret_cast<uint8_t*>(to->q));
    const float d = half(block + 208);
    for (int i = 0; i < 16; ++i) to->scales[i] = d * static_cast<float>(static_cast<int8_t>(block[192 + i]));
  }

  static void read_integers(const uint8_t* block, uint8_t* q) {
    nibbles<64>(block, 128, q);
    add_fields<2, 32>(block + 128, 64, 4, q);
    for (int i = 0; i < 256; ++i) q[i] = static_cast<uint8_t>(q[i] - 32);
  }

  static constexpr int kTwoLevelBits = 6, kTwoLevelGroups = 16;
  static void read_two_level(const uint8_t* block, uint8_t* q, TwoLevelNumbers* scales, TwoLevelNumbers*) {
    read_integers(block, q);
    std::memcpy(scales->integers, block + 192, 16);
    copy_half(block + 208, &scales->factor);
  }
};

struct Q3_K {
  static constexpr int kBytes = 110;
  static constexpr float kLargest = 4.0f;
  static constexpr bool kMins = false, kSymmetric = false;
  static void read_groups(const uint8_t* block, GroupsOf16* to) {
    auto* q = reinterpret_cast<uint8_t*>(to->q);
    std::memset(q, 0, 256);
    add_fields<2, 32>(block + 32, 64, 0, q);
    add_fields<1, 32>(block, 32, 2, q);
    for (int i = 0; i < 256; ++i) q[i] = static_cast<uint8_t>(q[i] - 4);
    uint8_t six_bits[16];
    nibbles<8>(block + 96, 8, six_bits);
    add_fields<2, 4>(block + 104, 4, 4, six_bits);
    const float d = half(block + 108);
    for (int i = 0; i < 16; ++i) to->scales[i] = d * static_cast<float>(six_bits[i] - 32);
  }
};

struct Q2_K {
  static constexpr int kBytes = 84;
  static constexpr float kLargest = 3.0f;
  static constexpr bool kMins = true, kSymmetric = false;
  static void read_groups(const uint8_t* block, GroupsOf16* to) {
    auto* q = reinterpret_cast<uint8_t*>(to->q);
    std::memset(q, 0, 256);
    add_fields<2, 32>(block + 16, 64, 0, q);
    const float d = half(block + 80), dmin = half(block + 82);
    for (int i = 0; i < 16; ++i) {
      to->scales[i] = d * static_cast<float>(block[i] & 15);
      to->mins[i] = -dmin * static_cast<float>(block[i] >> 4);
    }
  }
};

// Unlike std::max, a NaN if one of them is.
inline float larger(float a, float b) {
  return a > b || a != a ? a : b;
}

// The scale with which a pair of groups of 16 fits into 8 bits.
template <class Type>
float joined_scale(const GroupsOf16& groups, int pair) {
  const float *scales = groups.scales + 2 * pair, *mins = groups.mins + 2 * pair;
  if constexpr (Type::kMins) {
    float largest[2];
    for (int i = 0; i < 2; ++i) {
      largest[i] = larger(std::abs(mins[i]), std::abs(scales[i] * Type::kLargest + mins[i])) / 127.0f;
    }
    return larger(largest[0], largest[1]);
  }
  float limit;
  if constexpr (Type::kSymmetric) {
    limit = std::floor(127.0f / Type::kLargest) * Type::kLargest;
  } else {
    // With scales of different signs -128 would become 128, which is too large.
    limit = (scales[0] < 0) == (scales[1] < 0) ? 128.0f : 127.0f;
  }
  return (std::abs(scales[0]) >= std::abs(scales[1]) ? scales[0] : scales[1]) * (Type::kLargest / limit);
}

// As store, but rounded away from zero, so that the integers still fit.
inline bool store_rounded_up(float number, Float16* out) {
  const bool fits = store(number, out);
  out->bits = static_cast<uint16_t>(out->bits + (std::abs(to_float(*out)) < std::abs(number)));
  return fits;
}
inline bool store_rounded_up(float number, float* out) {
  return store(number, out);
}

// Joins pairs of groups of 16 to groups of 32 with 8-bit integers.
template <class Type>
struct Joined {
  static constexpr int kInputs = 256, kBytes = Type::kBytes, kBits = 8;
  static constexpr bool kHasMins = false, kGroupsOf16 = true;
  template <class Scale>
  static bool read(const uint8_t* block, uint8_t* q, Scale* scales, Scale*) {
    constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low mantissa bits
    GroupsOf16 groups;
    Type::read_groups(block, &groups);
    bool fits = true;
    for (int pair = 0; pair < 8; ++pair) {
      fits &= store_rounded_up(joined_scale<Type>(groups, pair), scales + pair);
      const float divisor = to_float(scales[pair]);
      for (int group = 2 * pair; group < 2 * pair + 2; ++group) {
        const float scale = divisor != 0 ? groups.scales[group] / divisor : groups.scales[group];
        float min = 0;
        if constexpr (Type::kMins) min = divisor != 0 ? groups.mins[group] / divisor : groups.mins[group];
        for (int i = 16 * group; i < 16 * group + 16; ++i) {
          const float product = scale * static_cast<float>(groups.q[i]);
          const float rounded = (Type::kMins ? product + min : product) + kRound;
          uint32_t bits;
          std::memcpy(&bits, &rounded, 4);
          q[i] = static_cast<uint8_t>(bits);
        }
      }
    }
    return fits;
  }

  // The values before they are joined.
  static void dequantize(const uint8_t* block, float* values) {
    GroupsOf16 groups;
    Type::read_groups(block, &groups);
    for (int i = 0; i < 256; ++i) {
      const float product = static_cast<float>(groups.q[i]) * groups.scales[i / 16];
      values[i] = Type::kMins ? product + groups.mins[i / 16] : product;
    }
  }
};

}  // namespace fastinfer::cpu
