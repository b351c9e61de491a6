// Copies of bytes, bound by memory: compiled once, for every instruction set.
#include "quant/pack.h"

#include <cstring>
#include <stdexcept>

#include "common/cpu/parallel.h"

namespace fastinfer::cpu {
namespace {

// Offset of the four bytes (or nibble pairs) that hold `input`..`input + 3` of `row` within the packed weight.
int64_t packed_offset(int64_t row, int64_t input, int64_t k, int bits) {
  const int inputs_per_step = bits == 4 ? 8 : 4;
  const int64_t step_bytes = kTileRows * 4;
  const int64_t tile_bytes = k / inputs_per_step * step_bytes;
  return row / kTileRows * tile_bytes + input / inputs_per_step * step_bytes + row % kTileRows * 4;
}

void pack_row(const PackParams& p, int64_t row) {
  auto* out = static_cast<uint8_t*>(p.out);
  const uint8_t* q = row < p.n ? static_cast<const uint8_t*>(p.q) + row * p.k : nullptr;
  const int inputs_per_step = p.bits == 4 ? 8 : 4;
  for (int64_t input = 0; input < p.k; input += inputs_per_step) {
    uint8_t* destination = out + packed_offset(row, input, p.k, p.bits);
    uint32_t bytes = 0;
    if (q != nullptr) std::memcpy(&bytes, q + input, 4);
    if (q != nullptr && p.bits == 4) {
      uint32_t high;
      std::memcpy(&high, q + input + 4, 4);
      if (((bytes | high) & 0xf0f0f0f0u) != 0) throw std::runtime_error("int4_pack: q must be 0..15 throughout");
      bytes |= high << 4;
    }
    std::memcpy(destination, &bytes, 4);
  }
}

template <class Scale, class Out>
void dequantize_row(const DequantizeParams& p, int64_t row, Out* out) {
  const auto* q = static_cast<const uint8_t*>(p.weight.q);
  const int64_t group = p.weight.group_blocks * kBlockInputs;
  const int64_t first_scale = row / kTileRows * (p.k / group) * kTileRows + row % kTileRows;
  for (int64_t input = 0; input < p.k; ++input) {
    const uint8_t byte = q[packed_offset(row, input, p.k, p.bits) + input % 4];
    const int offset = p.bits == 4 && p.weight.mins == nullptr ? 8 : 0;
    const int value = p.bits == 8 ? static_cast<int8_t>(byte) : (input % 8 < 4 ? byte & 0x0f : byte >> 4) - offset;
    const int64_t s = first_scale + input / group * kTileRows;
    const float scale = to_float(static_cast<const Scale*>(p.weight.scales)[s]);
    const float min = p.weight.mins != nullptr ? to_float(static_cast<const Scale*>(p.weight.mins)[s]) : 0.0f;
    out[input] = from_float<Out>(scale * static_cast<float>(value) + min);
  }
}

}  // namespace

void pack(const PackParams& p) {
  const int64_t padded = (p.n + kTileRows - 1) / kTileRows * kTileRows;
  parallel_for(padded, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) pack_row(p, row);
  });
}

void dequantize(const DequantizeParams& p) {
  dispatch(p.dtype, [&]<class Out>(Out) {
    dispatch(p.weight.scale_dtype, [&]<class Scale>(Scale) {
      parallel_for(p.count, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          dequantize_row<Scale>(p, p.rows != nullptr ? p.rows[i] : i, static_cast<Out*>(p.out) + i * p.k);
        }
      });
    });
  });
}

}  // namespace fastinfer::cpu
