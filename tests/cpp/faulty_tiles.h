// Tiles in software, right ones and ones with a planted fault each, for tile_check.cpp.
#pragma once

#include <cmath>
#include <cstring>

#include "common/cpu/tile_check.h"
#include "common/cpu/tiles.h"

using namespace fastinfer::cpu;
using Right = amx_emulated::Tiles;

float value(uint32_t bits) {
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

float flushed(float number) {
  return std::abs(number) < 0x1p-126f ? std::copysign(0.0f, number) : number;
}

// tdpbf16ps of one sum after the other, and what may go wrong.
enum class Fault {
  kNone,
  kProductsFlushed,    // as without fused multiply-adds; products of normal bf16 are exact
  kOneChain,           // of even and odd inputs, from what was there
  kChainFromBefore,    // the even inputs' begins with what was there
  kDenormalArguments,  // are not zero
  kDenormalResults,    // are not zero
  kTruncated,          // the last bit of a chain is cut off
  kTinyUnbounded,  // no fault: results are tiny if they are so with an unbounded exponent. The software assumes that
                   // they are if they are so once rounded as denormals, and the check must not depend on it.
};

template <Fault kFault>
class Sums : public Right {
 public:
  template <int kSum, int kA, int kB>
  void multiply() {
    constexpr bool kFromBefore = kFault == Fault::kOneChain || kFault == Fault::kChainFromBefore;
    alignas(64) TileWords sums, a, b;
    store<kSum>(sums, 64);
    store<kA>(a, 64);
    store<kB>(b, 64);
    for (int i = 0; i < 256; ++i) {
      const int row = i / 16, column = i % 16;
      const float before = argument(sums[row][column]);
      float even = kFromBefore ? before : 0.0f, odd = 0.0f;
      for (int pair = 0; pair < 16; ++pair) {
        const uint32_t x = a[row][pair], y = b[pair][column];
        float& second = kFault == Fault::kOneChain ? even : odd;
        even = add_product(argument(x << 16), argument(y << 16), even);
        second = add_product(argument(x & 0xffff0000u), argument(y & 0xffff0000u), second);
      }
      const float products = result(static_cast<double>(even) + odd);
      sums[row][column] = bits_of(kFromBefore ? products : result(static_cast<double>(before) + products));
    }
    load<kSum>(sums, 64);
  }

 private:
  static float argument(uint32_t bits) {
    return kFault == Fault::kDenormalArguments ? value(bits) : flushed(value(bits));
  }

  static float add_product(float x, float y, float sum) {
    const double product = static_cast<double>(x) * y;
    if (kFault == Fault::kProductsFlushed) return result(static_cast<double>(result(product)) + sum);
    const float added = result(product + sum);
    return kFault == Fault::kTruncated ? value(bits_of(added) & ~1u) : added;
  }

  // Of two fp32 or of a product and one: in fp64 exact, or rounded so that it does no harm to round once more.
  static float result(double exact) {
    const auto rounded = static_cast<float>(exact);
    if (kFault == Fault::kDenormalResults) return rounded;
    if (kFault == Fault::kTinyUnbounded && std::abs(exact) < 0x1p-126 - 0x1p-151) return std::copysign(0.0f, rounded);
    return flushed(rounded);
  }
};

struct IgnoresStride : Right {
  template <int kTile>
  void load(const void* data, int64_t) {
    Right::load<kTile>(data, 64);
  }
};

struct StoresFifteenRows : Right {
  template <int kTile>
  void store(void* data, int64_t stride) const {
    alignas(64) uint8_t all[kCheckStoreStride * 16];
    Right::store<kTile>(all, stride);
    for (int row = 0; row < 15; ++row) std::memcpy(static_cast<uint8_t*>(data) + row * stride, all + row * stride, 64);
  }
};

struct StoresTooMuch : Right {
  template <int kTile>
  void store(void* data, int64_t stride) const {
    Right::store<kTile>(data, stride);
    if (stride > 64) static_cast<uint8_t*>(data)[64] = 1;
  }
};

struct KeepsTileSeven : Right {
  template <int kTile>
  void zero() {
    if (kTile != 7) Right::zero<kTile>();
  }
};

struct Swapped : Right {
  template <int kSum, int kA, int kB>
  void multiply() {
    Right::multiply<kSum, kB, kA>();
  }
};

// Bytes of B without a sign, as tdpbsud has them.
struct UnsignedBytes : Right {
  template <int kSum, int kA, int kB>
  void multiply_bytes() {
    alignas(64) uint32_t sums[16][16];
    int8_t a[16][16][4];
    uint8_t b[16][16][4];
    store<kSum>(sums, 64);
    store<kA>(a, 64);
    store<kB>(b, 64);
    for (int i = 0; i < 16 * 16 * 64; ++i) {
      const int row = i / 1024, column = i / 64 % 16, four = i / 4 % 16;
      sums[row][column] += static_cast<uint32_t>(a[row][four][i % 4] * b[four][column][i % 4]);
    }
    load<kSum>(sums, 64);
  }
};

// Sums of int32 that stop at the largest, as tdpbssds in vectors has them.
struct Saturated : Right {
  template <int kSum, int kA, int kB>
  void multiply_bytes() {
    alignas(64) int32_t before[16][16], after[16][16];
    store<kSum>(before, 64);
    Right::multiply_bytes<kSum, kA, kB>();
    store<kSum>(after, 64);
    for (int i = 0; i < 256; ++i) {
      int32_t& sum = after[i / 16][i % 16];
      const int32_t was = before[i / 16][i % 16];
      if (was > 0x7f000000 && sum < 0) sum = 0x7fffffff;
    }
    load<kSum>(after, 64);
  }
};
