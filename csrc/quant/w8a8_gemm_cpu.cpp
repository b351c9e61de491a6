#include "quant/w8a8_gemm.h"

#include <stdexcept>

#include "common/cpu/dot.h"
#include "gemm/gemm_cpu.h"
#if defined(FASTINFER_TILES)
#include "gemm/tile_gemm_cpu.h"
#endif

namespace fastinfer::cpu::FASTINFER_ISA {
namespace {

FASTINFER_INLINE f32v weight_scales(const W8a8GemmParams& p, int64_t row) {
  if (p.weight.scale_dtype == DType::kFloat16) return load(static_cast<const Float16*>(p.weight.scales) + row);
  return load(static_cast<const float*>(p.weight.scales) + row);
}

void throw_out_of_range() {
  throw std::runtime_error("w8a8_gemm: x must be -127..127 throughout");
}

#if defined(FASTINFER_TILES)
constexpr int kTileBytesInputs = 64;  // bytes in a row of a tile
constexpr int64_t kBlockBytes = kBlockInputs * kTileRows;

// A row of x as rows of tiles, kTileBytes apart.
void pack_row(const int8_t* x, int64_t k, uint8_t* out) {
  int8_t least = 0;
  for (int64_t i = 0; i < k; ++i) least = std::min(least, x[i]);
  if (least == -128) throw_out_of_range();
  for (; k >= kTileBytesInputs; k -= kTileBytesInputs, x += kTileBytesInputs, out += kTileBytes) {
    std::memcpy(out, x, kTileBytesInputs);
  }
  if (k > 0) std::fill(std::copy_n(x, kBlockInputs, out), out + kTileBytesInputs, uint8_t{0});
}

// x as whole tiles of 16 rows by 64 inputs; what is missing in the last ones is zero.
PackedRows pack_bytes(const W8a8GemmParams& p) {
  const int64_t steps = (p.k + kTileBytesInputs - 1) / kTileBytesInputs;
  const int64_t tiles = (p.m + kTileRows - 1) / kTileRows;
  auto* data = scratch_array<uint8_t>(kActivations, tiles * steps * kTileBytes);
  int64_t* first = scratch_array<int64_t>(kRowTiles, 1);
  *first = 0;
  parallel_for(tiles * kTileRows, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      uint8_t* out = data + row / kTileRows * steps * kTileBytes + row % kTileRows * kTileRowBytes;
      if (row < p.m) {
        pack_row(static_cast<const int8_t*>(p.x) + row * p.k, p.k, out);
      } else {
        for (int64_t step = 0; step < steps; ++step) std::fill_n(out + step * kTileBytes, kTileRowBytes, uint8_t{0});
      }
    }
  });
  return {data, first, steps};
}

// Two blocks of a packed weight are a tile as it is. The sums, and so the results, are those of the vectors.
void run_tiles(const W8a8GemmParams& p) {
  const PackedRows x = pack_bytes(p);
  const int64_t tiles = (p.n + kTileRows - 1) / kTileRows, blocks = p.k / kBlockInputs;
  const auto multiply = [&](int64_t, int64_t first, int64_t last, int64_t begin, int64_t end) {
    alignas(64) uint8_t copy[kPanelBytes];
    int32_t* sums = scratch_array<int32_t>(kTileSums, kSweepUnits * sums_size(kSweepRows));
    Tiles registers;
    for (int64_t row0 = begin; row0 < end; row0 += kSweepRows) {
      for (int64_t unit0 = first; unit0 < last; unit0 += kSweepUnits) {
        const auto columns = [&](int64_t unit, int64_t step, int64_t last_step) -> TileRows {
          const int64_t tile = 2 * (unit0 + unit), count = std::min(2 * last_step, blocks) - 2 * step;
          const auto* weight = static_cast<const uint8_t*>(p.weight.q) + (tile * blocks + 2 * step) * kBlockBytes;
          const int64_t next = tile + 1 < tiles ? blocks * kBlockBytes : 0;  // or the same tile twice
          if (2 * last_step <= blocks) return {weight, next};
          for (int i = 0; i < 2; ++i) {  // the last tiles are half full
            uint8_t* out = copy + i * kPanelBytes / 2;
            std::fill_n(std::copy_n(weight + i * next, count * kBlockBytes, out), kBlockBytes, uint8_t{0});
          }
          return {copy, kPanelBytes / 2};
        };
        const int64_t rows = std::min(kSweepRows, end - row0);
        const auto done = [&](int64_t unit, int64_t units, int64_t row, int64_t count) {
          for (int64_t i = 0; i < units; ++i) {
            for (int column = 0; column < kUnitColumns; column += kLanes) {
              const int64_t weight_row = (unit0 + unit + i) * kUnitColumns + column;
              if (weight_row >= p.n) break;
              const f32v scale = weight_scales(p, weight_row);
              for (int64_t r = 0; r < count; ++r) {
                int32_t* const sum = sums + i * sums_size(rows) + r * kUnitColumns + column;  // becomes the product
                store_as(sum, to_f32(load_as<i32v>(sum)) * scale * p.x_scales[row0 + row + r]);
              }
            }
          }
          const auto* products = reinterpret_cast<const float*>(sums);
          finish(p, 0, {products, kUnitColumns, sums_size(rows), unit0 + unit, units}, row0 + row, count);
        };
        multiply_panels(registers, {x.at(0, row0, 0), x.blocks * kTileBytes}, rows, x.blocks,
                        std::min(kSweepUnits, last - unit0), columns, sums, done);
      }
    }
  };
  for_each_run(p, (tiles + 1) / 2, 0, multiply);
}
#else

// sum + w x + kSumOffset x, over four neighbours; w in -128..127, x in -127..127.
#if defined(FASTINFER_AVX512_VNNI)
constexpr int kSumOffset = 128;
FASTINFER_INLINE i32v multiply_add(i32v sum, i8v w, i8v x) {
  return dpbusd(sum, (u8v)w ^ 0x80, x);  // wants unsigned weights: w + 128
}
#else
constexpr int kSumOffset = 0;
#if !defined(FASTINFER_AVX2)
FASTINFER_INLINE i8v sign(i8v a, i8v b) {
  return b < 0 ? -a : (b == 0 ? i8v{} : a);
}
#endif
FASTINFER_INLINE i32v multiply_add(i32v sum, i8v w, i8v x) {
  // |w| times x with w's sign: a pair is at most 2 * 128 * 127 = 32,512.
  return sum + madd(maddubs((u8v)sign(w, w), sign(x, w)), i16v{} + 1);
}
#endif

// Lanes are weight rows. Sums are int32, and so the same in every order.
struct W8a8Kernel {
  static constexpr int kMaxRows = kLanes == 16 ? 8 : 4;  // there are 32 or 16 registers
  static constexpr int kSteps = kBlockInputs / 4, kStepBytes = kTileRows * 4;

  const W8a8GemmParams& p;
  const int32_t* totals;  // [m], of the rows of x

  template <int kRows>
  void tile(int64_t tile, int64_t row, float* out, int stride) const {
    const int64_t steps = p.k / 4;
    const auto* x = static_cast<const int8_t*>(p.x) + row * p.k;
    for (int half = 0; half < kHalves; ++half) {
      const auto* weight = static_cast<const int8_t*>(p.weight.q) + tile * steps * kStepBytes + half * kLanes * 4;
      i32v sums[kRows] = {};
      for (int64_t s = 0; s < steps; ++s) {
        const i8v w = load_as<i8v>(weight + s * kStepBytes);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) sums[r] = multiply_add(sums[r], w, (i8v)broadcast_word(x + r * p.k + 4 * s));
      }
      const f32v scale = weight_scales(p, tile * kTileRows + half * kLanes);
      for (int r = 0; r < kRows; ++r) {
        const i32v sum = sums[r] - kSumOffset * totals[row + r];
        store(out + r * stride + half * kLanes, to_f32(sum) * scale * p.x_scales[row + r]);
      }
    }
  }
};

void run_vectors(const W8a8GemmParams& p) {
  int32_t* totals = scratch_array<int32_t>(kScales, p.m);
  parallel_for(p.m, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const auto* x = static_cast<const int8_t*>(p.x) + row * p.k;
      int32_t total = 0;
      bool fits = true;
      for (int64_t i = 0; i < p.k; ++i) {
        total += x[i];
        fits = fits && x[i] != -128;
      }
      // The byte products of some instruction sets know no -(-128).
      if (!fits) throw_out_of_range();
      totals[row] = total;
    }
  });
  run_gemm(p, W8a8Kernel{p, totals});
}
#endif

}  // namespace

void w8a8_gemm(const W8a8GemmParams& p) {
#if defined(FASTINFER_TILES)
  run_tiles(p);
#else
  run_vectors(p);
#endif
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
