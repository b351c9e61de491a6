// Copies of bytes, bound by memory: compiled once, for every instruction set.
#include "quant/pack.h"

#include <algorithm>
#include <stdexcept>

#include "common/cpu/parallel.h"
#include "quant/pack_tile_cpu.h"

namespace fastinfer::cpu {
namespace {

// Offset of the four bytes (or nibble pairs) that hold `input`..`input + 3` of `row` within the packed weight.
int64_t packed_offset(int64_t row, int64_t input, int64_t k, int bits) {
  const int inputs_per_step = bits == 4 ? 8 : 4;
  const int64_t step_bytes = kTileRows * 4;
  const int64_t tile_bytes = k / inputs_per_step * step_bytes;
  return row / kTileRows * tile_bytes + input / inputs_per_step * step_bytes + row % kTileRows * 4;
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
  const int64_t tile_bytes = kTileRows * p.k * p.bits / 8;
  parallel_for((p.n + kTileRows - 1) / kTileRows, [&](int64_t begin, int64_t end) {
    for (int64_t tile = begin; tile < end; ++tile) {
      const int64_t rows = std::min<int64_t>(p.n - tile * kTileRows, kTileRows);
      const uint8_t* q = static_cast<const uint8_t*>(p.q) + tile * kTileRows * p.k;
      uint8_t* out = static_cast<uint8_t*>(p.out) + tile * tile_bytes;
      if (p.bits == 8) {
        pack_tile<8>(q, p.k, rows, p.k, out);
      } else if (pack_tile<4>(q, p.k, rows, p.k, out) > 15) {
        throw std::runtime_error("int4_pack: q must be 0..15 throughout");
      }
    }
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
