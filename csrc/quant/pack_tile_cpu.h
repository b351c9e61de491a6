// The CPU's packed layout of one tile (quant/quantized_gemm.h), written front to back.
#pragma once

#include <cstdint>
#include <cstring>

#include "quant/quantized_gemm.h"

namespace fastinfer::cpu {

// Returns the bits that some byte has set.
inline uint8_t bits_of_bytes(uint64_t eight) {
  eight |= eight >> 32;
  eight |= eight >> 16;
  return static_cast<uint8_t>(eight | eight >> 8);
}

// Packs 32 inputs of a row of 6 bits, -32..31: four words of low bits, and two of high bits. Returns the bits that some
// byte of q + 32 has set.
inline uint64_t pack_row6(const uint8_t* q, uint8_t* out) {
  uint64_t seen = 0;
  for (int run = 0; run < 2; ++run) {
    uint32_t high = 0;
    for (int half = 0; half < 2; ++half) {
      uint64_t eight;
      std::memcpy(&eight, q + 16 * run + 8 * half, 8);
      eight = ((eight & 0x7f7f7f7f7f7f7f7fu) + 0x2020202020202020u) ^ (eight & 0x8080808080808080u);  // + 32 each
      seen |= eight;
      const uint64_t low = eight & 0x0f0f0f0f0f0f0f0fu, bits = eight >> 4 & 0x0303030303030303u;
      const auto word = static_cast<uint32_t>(low | low >> 28);
      std::memcpy(out + (2 * run + half) * 4 * kTileRows, &word, 4);
      high |= static_cast<uint32_t>(bits | bits >> 30) << 4 * half;
    }
    std::memcpy(out + (4 + run) * 4 * kTileRows, &high, 4);
  }
  return seen;
}

// Packs 32 inputs of a row of 5 bits, 0..31: four words of low bits and one of high bits. Returns the bits that some
// byte of q has set.
inline uint64_t pack_row5(const uint8_t* q, uint8_t* out) {
  uint64_t seen = 0;
  uint32_t high = 0;
  for (int step = 0; step < 4; ++step) {
    uint64_t eight;
    std::memcpy(&eight, q + 8 * step, 8);
    seen |= eight;
    const uint64_t low = eight & 0x0f0f0f0f0f0f0f0fu, bits = eight >> 4 & 0x0101010101010101u;
    const auto word = static_cast<uint32_t>(low | low >> 28);
    std::memcpy(out + step * 4 * kTileRows, &word, 4);
    high |= static_cast<uint32_t>(bits | bits >> 31) << 2 * step;
  }
  std::memcpy(out + 4 * 4 * kTileRows, &high, 4);
  return seen;
}

// Packs `inputs` columns (a multiple of kBlockInputs) of a tile whose rows lie `stride` bytes apart; rows past `rows`
// become zeros. Returns the bits that some byte of q has set, which for 4 and 5 bits must be the lowest. For 6 bits it
// returns those of q + 32, which must be the lowest six.
template <int kBits>
uint8_t pack_tile(const uint8_t* q, int64_t stride, int64_t rows, int64_t inputs, uint8_t* out) {
  if constexpr (kBits == 5 || kBits == 6) {
    constexpr int kBytes = kBlockInputs * kTileRows * kBits / 8;
    uint64_t seen = 0;
    for (int64_t input = 0; input < inputs; input += kBlockInputs, out += kBytes) {
      if (rows < kTileRows) std::memset(out, 0, kBytes);
      for (int64_t row = 0; row < rows; ++row) {
        const uint8_t* inputs_of_row = q + row * stride + input;
        seen |= kBits == 5 ? pack_row5(inputs_of_row, out + 4 * row) : pack_row6(inputs_of_row, out + 4 * row);
      }
    }
    return bits_of_bytes(seen);
  }
  uint64_t seen = 0;
  for (int64_t input = 0; input < inputs; input += kBits == 4 ? 8 : 4, out += 4 * kTileRows) {
    if (rows < kTileRows) std::memset(out, 0, 4 * kTileRows);
    for (int64_t row = 0; row < rows; ++row) {
      if constexpr (kBits == 4) {
        uint64_t eight;
        std::memcpy(&eight, q + row * stride + input, 8);
        seen |= eight;
        const auto word = static_cast<uint32_t>(eight | eight >> 28);  // the upper four become the high nibbles
        std::memcpy(out + 4 * row, &word, 4);
      } else {
        std::memcpy(out + 4 * row, q + row * stride + input, 4);
      }
    }
  }
  return bits_of_bytes(seen);
}

}  // namespace fastinfer::cpu
