// The CPU's packed layout of one tile (quant/quantized_gemm.h), written front to back.
#pragma once

#include <cstdint>
#include <cstring>

#include "quant/quantized_gemm.h"

namespace fastinfer::cpu {

// Packs `inputs` columns (a multiple of kBlockInputs) of a tile whose rows lie `stride` bytes apart; rows past `rows`
// become zeros. Returns the bits that some byte of q has set, which for 4 bits must be the lowest four.
template <int kBits>
uint8_t pack_tile(const uint8_t* q, int64_t stride, int64_t rows, int64_t inputs, uint8_t* out) {
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
  seen |= seen >> 32;
  seen |= seen >> 16;
  return static_cast<uint8_t>(seen | seen >> 8);
}

}  // namespace fastinfer::cpu
