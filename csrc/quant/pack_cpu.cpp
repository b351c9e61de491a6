// Copies of bytes, bound by memory: compiled once, for every instruction set.
#include "quant/pack.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "common/cpu/parallel.h"
#include "quant/pack_tile_cpu.h"

namespace fastinfer::cpu {
namespace {

constexpr int64_t kStepBytes = kTileRows * 4;

// The integer of one of a block's 32 inputs; `block` points to its row's first four bytes.
template <int kBits>
int integer(const uint8_t* block, int input) {
  if constexpr (kBits == 8) {
    return static_cast<int8_t>(block[input / 4 * kStepBytes + input % 4]);
  } else {
    const int low = block[input / 8 * kStepBytes + input % 4] >> input % 8 / 4 * 4 & 15;
    if constexpr (kBits == 4) return low;
    if constexpr (kBits == 5) return low | (block[4 * kStepBytes + input % 4] >> input / 4 & 1) << 4;
    const int high = block[(4 + input / 16) * kStepBytes + input % 4] >> input % 16 / 4 * 2 & 3;
    return (low | high << 4) - 32;
  }
}

// The scale or minimum of a row's group.
template <class Scale>
float number(const void* numbers, int64_t row, int64_t group, int64_t groups) {
  return to_float(static_cast<const Scale*>(numbers)[(row / kTileRows * groups + group) * kTileRows + row % kTileRows]);
}

template <class Scale>
  requires(Scale::kGroups > 0)
float number(const void* numbers, int64_t row, int64_t group, int64_t groups) {
  const auto* both = static_cast<const int8_t*>(numbers) +
                     (row / kTileRows * groups + group) / Scale::kGroups * (2 + Scale::kGroups) * kTileRows;
  Float16 factor;
  std::memcpy(&factor, both + row % kTileRows * 2, 2);
  return static_cast<float>(both[(2 + group % Scale::kGroups) * kTileRows + row % kTileRows]) * to_float(factor);
}

template <int kBits, class Scale, class Out>
void dequantize_row(const DequantizeParams& p, int64_t row, Out* out) {
  const int64_t group_inputs = kBits == 6 ? kBlockInputs / 2 : p.weight.group_blocks * kBlockInputs;
  const int64_t groups = p.k / group_inputs;
  const int offset = kBits < 6 && p.weight.mins == nullptr ? 1 << (kBits - 1) : 0;
  const uint8_t* tile = static_cast<const uint8_t*>(p.weight.q) + row / kTileRows * kTileRows * p.k * kBits / 8;
  for (int64_t group = 0; group < groups; ++group) {
    const float scale = number<Scale>(p.weight.scales, row, group, groups);
    const float min = p.weight.mins != nullptr ? number<Scale>(p.weight.mins, row, group, groups) : 0.0f;
    for (int64_t i = group * group_inputs; i < (group + 1) * group_inputs; ++i) {
      const uint8_t* block = tile + i / kBlockInputs * kBlockInputs * kTileRows * kBits / 8 + row % kTileRows * 4;
      const int q = integer<kBits>(block, static_cast<int>(i % kBlockInputs)) - offset;
      out[i] = from_float<Out>(scale * static_cast<float>(q) + min);
    }
  }
}

// Calls fn(number of bits, type of scale) with the weight's, as types.
template <class Fn>
void dispatch_weight(const DequantizeParams& p, const Fn& fn) {
  if (p.bits == 6) return fn.template operator()<6, TwoLevel<16> >();
  const auto with_bits = [&]<class Scale>(Scale) {
    if (p.bits == 4) fn.template operator()<4, Scale>();
    if (p.bits == 5) fn.template operator()<5, Scale>();
    if (p.bits == 8) fn.template operator()<8, Scale>();
  };
  p.weight.has_two_levels() ? with_bits(TwoLevel<32>{}) : dispatch(p.weight.scale_dtype, with_bits);
}

}  // namespace

void pack(const PackParams& p) {
  const int64_t tile_bytes = kTileRows * p.k * p.bits / 8;
  parallel_for((p.n + kTileRows - 1) / kTileRows, [&](int64_t begin, int64_t end) {
    for (int64_t tile = begin; tile < end; ++tile) {
      const int64_t rows = std::min<int64_t>(p.n - tile * kTileRows, kTileRows);
      const uint8_t* q = static_cast<const uint8_t*>(p.q) + tile * kTileRows * p.k;
      uint8_t* out = static_cast<uint8_t*>(p.out) + tile * tile_bytes;
      if (p.bits == 8) {
        pack_tile<8>(q, p.k, rows, p.k, out);
      } else if (p.bits == 6) {
        if (pack_tile<6>(q, p.k, rows, p.k, out) > 63) {
          throw std::runtime_error("int6_pack: q must be -32..31 throughout");
        }
      } else if (p.bits == 5) {
        if (pack_tile<5>(q, p.k, rows, p.k, out) > 31) {
          throw std::runtime_error("int5_pack: q must be 0..31 throughout");
        }
      } else if (pack_tile<4>(q, p.k, rows, p.k, out) > 15) {
        throw std::runtime_error("int4_pack: q must be 0..15 throughout");
      }
    }
  });
}

void dequantize(const DequantizeParams& p) {
  dispatch(p.dtype, [&]<class Out>(Out) {
    dispatch_weight(p, [&]<int kBits, class Scale>() {
      parallel_for(p.count, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          dequantize_row<kBits, Scale>(p, p.rows != nullptr ? p.rows[i] : i, static_cast<Out*>(p.out) + i * p.k);
        }
      });
    });
  });
}

}  // namespace fastinfer::cpu
