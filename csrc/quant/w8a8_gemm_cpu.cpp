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
  const int64_t tiles = (p.n + kTileRows - 1) / kTileRows;
  const int64_t blocks = p.k / kBlockInputs, whole = blocks / 2;  // steps
  const int64_t parts = std::max<int64_t>(1, (whole + kPanelSteps - 1) / kPanelSteps);
  const int64_t sweep = std::clamp(kSweepBytes / std::max<int64_t>(p.k, 1) / kUnitRows * kUnitRows,
                                   int64_t{2 * kUnitRows}, kMostSweepRows);
  for_each_run(p, (tiles + 1) / 2, 0, [&](int64_t, int64_t first, int64_t last, int64_t first_row, int64_t end_row) {
    alignas(64) uint8_t half[2 * kTileBytes] = {};
    alignas(64) int32_t sums[kMostSweepRows * kUnitRows];
    Tiles registers;
    for (int64_t row0 = first_row; row0 < end_row; row0 += sweep) {
      const int64_t count = std::min(sweep, end_row - row0);
      const auto multiply = [&](TileRows weight, int64_t begin, int64_t steps) {
        for (int64_t row = 0; row < count; row += kUnitRows) {
          const auto product = row + kTileRows < count ? multiply_tiles<2, int32_t> : multiply_tiles<1, int32_t>;
          product(registers, {x.at(0, row0 + row, begin), x.blocks * kTileBytes}, weight, steps, begin == 0,
                  sums + row * kUnitRows, kUnitRows);
        }
      };
      for (int64_t unit = first; unit < last; ++unit) {
        const auto* weight = static_cast<const uint8_t*>(p.weight.q) + 2 * unit * blocks * kBlockBytes;
        const int64_t next = 2 * unit + 1 < tiles ? blocks * kBlockBytes : 0;  // or the same tile twice
        for (int64_t part = 0; part < parts; ++part) {
          const int64_t begin = whole * part / parts, end = whole * (part + 1) / parts;
          if (begin < end || blocks == 0) multiply({weight + 2 * begin * kBlockBytes, next}, begin, end - begin);
        }
        if (blocks % 2 != 0) {
          for (int i = 0; i < 2; ++i) {
            std::memcpy(half + i * kTileBytes, weight + 2 * whole * kBlockBytes + i * next, kBlockBytes);
          }
          multiply({half, kTileBytes}, whole, 1);
        }
        for (int column = 0; column < (next == 0 ? kTileRows : kUnitRows); column += kLanes) {
          const f32v scale = weight_scales(p, unit * kUnitRows + column);
          for (int64_t row = 0; row < count; ++row) {
            int32_t* const sum = sums + row * kUnitRows + column;  // becomes the product
            store_as(sum, to_f32(load_as<i32v>(sum)) * scale * p.x_scales[row0 + row]);
          }
        }
        finish(p, 0, unit, row0, static_cast<int>(count), reinterpret_cast<const float*>(sums), kUnitRows);
      }
    }
  });
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
