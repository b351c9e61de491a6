// Readers of the IQ types of GGUF whose weights are points of a grid; see gguf_blocks_cpu.h. All have blocks of 256.
//
// Types with one scale for a group of 32, except IQ3_S, become indices into a look-up table. The lower three bits are
// the weight's level; the fourth says that it is negative, in IQ1_S that the group's offset is. Types with groups of 16
// are joined.
#pragma once

#include <cstdint>
#include <cstring>

#include "formats/gguf_blocks_cpu.h"
#include "formats/gguf_grids_cpu.h"

namespace fastinfer::cpu {

constexpr int kIQ2Levels[] = {8, 25, 43};

template <int kPoints>
using GridOf8 = Grid<8, 3, kPoints>;

// Signs of 8 weights, of which seven are stored: the number of negative ones is even.
inline uint8_t eight_signs(uint32_t seven) {
  const uint32_t four = (seven ^ (seven >> 4)) & 15;  // have the same parity, which 0x6996 lists
  return static_cast<uint8_t>(seven | (0x6996u >> four & 1) << 7);
}

inline void indices_with_signs(const uint8_t* point, uint8_t signs, uint8_t* q) {
  uint64_t levels;
  std::memcpy(&levels, point, 8);
  levels |= spread_bits(signs) >> 4;
  std::memcpy(q, &levels, 8);
}

inline void integers_with_signs(const uint8_t* point, uint8_t signs, int8_t* q) {
  uint64_t values;
  std::memcpy(&values, point, 8);
  const uint64_t negative = spread_bits(signs) >> 7;
  values = (values ^ negative * 255) + negative;  // no byte overflows, because none is 0
  std::memcpy(q, &values, 8);
}

inline int nibble(const uint8_t* bytes, int index) {
  return bytes[index / 2] >> index % 2 * 4 & 15;
}

template <class Integer>
Integer load(const uint8_t* bytes, int index) {
  Integer number;
  std::memcpy(&number, bytes + sizeof(Integer) * index, sizeof(Integer));
  return number;
}

struct GridIndices {
  static constexpr int kInputs = 256, kBits = 4;
  static constexpr bool kHasMins = false, kGroupsOf16 = false;
};

struct IQ2_XXS : GridIndices {
  static constexpr int kBytes = 66;
  template <class Scale>
  static bool read(const uint8_t* block, uint8_t* q, Scale* scales, Scale*) {
    static const GridOf8<256> grid(kIQ2_XXS, [](int level) { return level; });
    const float d = half(block);
    bool fits = true;
    for (int group = 0; group < 8; ++group) {
      const uint8_t* const places = block + 2 + 8 * group;
      const auto signs = load<uint32_t>(places, 1);
      fits &= store(d * (0.5f + static_cast<float>(signs >> 28)) * 0.25f, scales + group);
      for (int i = 0; i < 4; ++i, q += 8) indices_with_signs(grid[places[i]], eight_signs(signs >> 7 * i & 127), q);
    }
    return fits;
  }
};

struct IQ3_XXS : GridIndices {
  static constexpr int kBytes = 98;
  template <class Scale>
  static bool read(const uint8_t* block, uint8_t* q, Scale* scales, Scale*) {
    static const Grid<4, 8, 256> grid(kIQ3_XXS, [](int level) { return level; });
    const float d = half(block);
    bool fits = true;
    for (int group = 0; group < 8; ++group) {
      const auto signs = load<uint32_t>(block + 66, group);
      fits &= store(d * (0.5f + static_cast<float>(signs >> 28)) * 0.5f, scales + group);
      for (int i = 0; i < 4; ++i, q += 8) {
        uint8_t levels[8];
        for (int j = 0; j < 2; ++j) std::memcpy(levels + 4 * j, grid[block[2 + 8 * group + 2 * i + j]], 4);
        indices_with_signs(levels, eight_signs(signs >> 7 * i & 127), q);
      }
    }
    return fits;
  }
};

// The odd numbers from -15 to 15, which are 2 q - 15: 4-bit integers with a minimum.
struct IQ3_S {
  static constexpr int kInputs = 256, kBytes = 110, kBits = 4;
  static constexpr bool kHasMins = true, kGroupsOf16 = false;
  template <class Scale>
  static bool read(const uint8_t* block, uint8_t* q, Scale* scales, Scale* mins) {
    static const Grid<4, 8, 512> grid(kIQ3_S, [](int level) { return level + 8; });
    const float d = half(block);
    bool fits = true;
    for (int group = 0; group < 8; ++group) {
      const float scale = d * static_cast<float>(1 + 2 * nibble(block + 106, group));
      fits &= store(2.0f * scale, scales + group);
      fits &= store(-15.0f * scale, mins + group);
      for (int i = 0; i < 8; i += 2, q += 8) {
        uint8_t numbers[8];
        for (int j = i; j < i + 2; ++j) {
          const int place = block[2 + 8 * group + j] | (block[66 + group] >> j & 1) << 8;
          std::memcpy(numbers + 4 * (j - i), grid[place], 4);
        }
        uint64_t values;
        std::memcpy(&values, numbers, 8);
        values ^= (spread_bits(block[74 + 4 * group + i / 2]) >> 7) * 15;  // 15 - q has the other sign
        std::memcpy(q, &values, 8);
      }
    }
    return fits;
  }
};

// A weight is -1, 0 or 1, plus an offset of 1/8 or -1/8. Eight times that is an integer, so the scale is an eighth.
struct IQ1_S : GridIndices {
  static constexpr int kBytes = 50;
  template <class Scale>
  static bool read(const uint8_t* block, uint8_t* q, Scale* scales, Scale*) {
    static const GridOf8<2048> grid(kIQ1, [](int level) { return level; });
    const float d = half(block);
    bool fits = true;
    for (int group = 0; group < 8; ++group) {
      const auto high = load<uint16_t>(block + 34, group);
      fits &= store(d * static_cast<float>(2 * (high >> 12 & 7) + 1) * 0.125f, scales + group);
      for (int i = 0; i < 4; ++i, q += 8) {
        const int place = block[2 + 4 * group + i] | (high >> 3 * i & 7) << 8;
        indices_with_signs(grid[place], high & 0x8000 ? 255 : 0, q);
      }
    }
    return fits;
  }
};

// The same in groups of 16, with an offset for each 8 weights. The four highest bits of the scales are the block's.
struct IQ1_M {
  static constexpr int kInputs = 256, kBytes = 56;
  static constexpr float kLargest = 9.0f;
  static constexpr bool kMins = false, kSymmetric = true;
  static void read_groups(const uint8_t* block, GroupsOf16* to) {
    static const GridOf8<2048> grid(kIQ1, [](int level) { return 8 * (level - 1); });
    const uint8_t *high = block + 32, *scales = block + 48;
    int bits = 0;
    for (int i = 0; i < 4; ++i) bits |= load<uint16_t>(scales, i) >> 12 << 4 * i;
    const uint8_t factor[] = {static_cast<uint8_t>(bits), static_cast<uint8_t>(bits >> 8)};
    const float d = half(factor);
    for (int i = 0; i < 16; ++i) {
      const int scale = load<uint16_t>(scales, i / 4) >> i % 4 * 3 & 7;
      to->scales[i] = d * static_cast<float>(2 * scale + 1) * 0.125f;
    }
    for (int i = 0; i < 32; ++i) {
      const int four_bits = nibble(high, i), offset = four_bits & 8 ? -1 : 1;
      const uint8_t* const point = grid[block[i] | (four_bits & 7) << 8];
      for (int j = 0; j < 8; ++j) to->q[8 * i + j] = static_cast<int8_t>(static_cast<int8_t>(point[j]) + offset);
    }
  }
};

inline void read_iq2_scales(const uint8_t* block, const uint8_t* four_bits, float* scales) {
  const float d = half(block);
  for (int i = 0; i < 16; ++i) scales[i] = d * (0.5f + static_cast<float>(nibble(four_bits, i))) * 0.25f;
}

struct IQ2_XS {
  static constexpr int kInputs = 256, kBytes = 74;
  static constexpr float kLargest = 43.0f;
  static constexpr bool kMins = false, kSymmetric = true;
  static void read_groups(const uint8_t* block, GroupsOf16* to) {
    static const GridOf8<512> grid(kIQ2_XS, [](int level) { return kIQ2Levels[level]; });
    read_iq2_scales(block, block + 66, to->scales);
    for (int i = 0; i < 32; ++i) {
      const auto bits = load<uint16_t>(block + 2, i);
      integers_with_signs(grid[bits & 511], eight_signs(bits >> 9), to->q + 8 * i);
    }
  }
};

struct IQ2_S {
  static constexpr int kInputs = 256, kBytes = 82;
  static constexpr float kLargest = 43.0f;
  static constexpr bool kMins = false, kSymmetric = true;
  static void read_groups(const uint8_t* block, GroupsOf16* to) {
    static const GridOf8<1024> grid(kIQ2_S, [](int level) { return kIQ2Levels[level]; });
    read_iq2_scales(block, block + 74, to->scales);
    for (int i = 0; i < 32; ++i) {
      const int place = block[2 + i] | (block[66 + i / 4] >> i % 4 * 2 & 3) << 8;
      integers_with_signs(grid[place], block[34 + i], to->q + 8 * i);
    }
  }
};

}  // namespace fastinfer::cpu
