#include "common/cpu/tile_check.h"

#include <cstdio>
#include <cstring>
#include <memory>

namespace fastinfer::cpu {
namespace {

// The same numbers everywhere: xorshift of 64 bits.
class Random {
 public:
  uint32_t bits() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return static_cast<uint32_t>(state_ >> 32);
  }

  // fp32 with any sign and mantissa, and one of `count` exponents.
  uint32_t number(uint32_t exponent, uint32_t count) {
    return (bits() & 0x807fffffu) | (exponent + bits() % count) << 23;
  }

 private:
  uint64_t state_ = 0x9e3779b97f4a7c15;
};

struct Exponents {
  uint32_t a, num_a, b, num_b, sums, num_sums;
};

// Where the exponents of fp32 and bf16 lie: 127 stands for 1, 0 for denormals.
constexpr Exponents kExponents[kFloatChecks] = {
    {124, 6, 124, 6, 126, 8},     // like a model's: the order of the sums shows
    {107, 40, 107, 40, 117, 40},  // far apart: sums lose parts of what is added
    {60, 20, 50, 20, 0, 6},       // products and sums on both sides of the smallest normal number
    {0, 3, 230, 20, 96, 16},      // denormal factors, which count as zero
    {124, 6, 124, 6, 126, 8},     // with infinities, NaN and zeros, see special()
};
constexpr int kSpecial = 4;  // the last one

// One number in 256 becomes special.
uint32_t special(Random& random, uint32_t number) {
  constexpr uint32_t kNumbers[] = {0x7f800000, 0xff800000, 0x7fc00000, 0x80000000};
  const uint32_t bits = random.bits();
  return bits % 256 == 0 ? kNumbers[bits >> 30] : number;
}

template <class Number>
void fill(TileWords (&tiles)[4], const Number& number) {
  for (auto& tile : tiles) {
    for (auto& row : tile) {
      for (uint32_t& word : row) word = number();
    }
  }
}

void fill_inputs(TileCheckInputs& in) {
  Random random;
  for (auto& rows : in.rows) {
    for (uint8_t& byte : rows) byte = static_cast<uint8_t>(random.bits());
  }
  for (int i = 0; i < kFloatChecks; ++i) {
    const auto number = [&](uint32_t exponent, uint32_t count) {
      const uint32_t value = random.number(exponent, count);
      return i == kSpecial ? special(random, value) : value;
    };
    const auto pair = [&](uint32_t exponent, uint32_t count) {
      const uint32_t low = number(exponent, count) >> 16;
      return low | (number(exponent, count) & 0xffff0000u);
    };
    const Exponents& e = kExponents[i];
    fill(in.floats[i].sums, [&] { return number(e.sums, e.num_sums); });
    fill(in.floats[i].a, [&] { return pair(e.a, e.num_a); });
    fill(in.floats[i].b, [&] { return pair(e.b, e.num_b); });
  }
  const auto bits = [&] { return random.bits(); };
  fill(in.bytes[0].sums, bits);
  fill(in.bytes[0].a, bits);
  fill(in.bytes[0].b, bits);
  // The largest products, with sums that overflow or do not.
  const auto extreme = [&] { return (random.bits() & 0x01010101u) * 0xffu ^ 0x80808080u; };  // -128 or 127
  fill(in.bytes[1].sums, [&] { return 0x7fff0000u + (random.bits() & 0x1ffffu); });
  fill(in.bytes[1].a, extreme);
  fill(in.bytes[1].b, extreme);
}

bool is_nan(uint32_t bits) {
  return (bits & 0x7fffffffu) > 0x7f800000u;
}

std::string difference(const char* instruction, const TileWords* found, const TileWords* expected, int tiles,
                       bool of_floats) {
  for (int i = 0; i < tiles * 256; ++i) {
    const uint32_t has = found[i / 256][i / 16 % 16][i % 16], wants = expected[i / 256][i / 16 % 16][i % 16];
    if (has == wants || (of_floats && is_nan(has) && is_nan(wants))) continue;
    char text[80];
    std::snprintf(text, sizeof(text), "%s gave 0x%08x, expected 0x%08x", instruction, has, wants);
    return text;
  }
  return "";
}

}  // namespace

std::string tile_difference(TileCheckSteps steps, TileCheckSteps expected) {
  const auto in = std::make_unique<TileCheckInputs>();
  const auto found = std::make_unique<TileCheckResults>(), wanted = std::make_unique<TileCheckResults>();
  fill_inputs(*in);
  steps(*in, *found);
  expected(*in, *wanted);
  if (std::memcmp(found->moved, wanted->moved, sizeof(found->moved)) != 0) {
    return "tileloadd and tilestored gave other bytes than expected";
  }
  for (const std::string& text : {difference("tilezero", found->zeroed, wanted->zeroed, 8, false),
                                  difference("tdpbf16ps", found->floats, wanted->floats, 4 * kFloatChecks, true),
                                  difference("tdpbssd", found->bytes, wanted->bytes, 4 * kByteChecks, false)}) {
    if (!text.empty()) return text;
  }
  return "";
}

}  // namespace fastinfer::cpu
