// Matrix products in bf16 tiles, for the rows of x that are tokens of a prompt (GemmParams::first_prompt_row).
//
// x is packed once, after the prologue, into whole tiles of 16 rows by 32 inputs. A thread takes a run of units, each
// of two tiles of the weight, and unpacks one chunk of their inputs after another into a panel that stays in the L1; 2
// x 2 tiles of sums go through the chunk. A sum takes 32 inputs after 32, in order, so that it does not depend on the
// chunks, on the other rows, or on the number of threads.
#pragma once

#include <algorithm>

#include "common/cpu/tile_products.h"
#include "gemm/gemm_cpu.h"

namespace fastinfer::cpu::FASTINFER_ISA {

// kSweepRows rows of x and so many units of the weight are multiplied before the sums are finished. The inputs of a
// panel, 576 KB, and the sums, 512 KB, stay in an L2 of 2 MB, and a weight is unpacked once for all of the rows.
inline constexpr int64_t kSweepUnits = 8;

// Rows begin .. end - 1 of an expert, by their places; without experts, those of the prompt.
struct PlacedRows {
  int64_t begin, end;

  static PlacedRows of(const GemmParams& p, int64_t expert) {
    const int32_t* start = p.expert_rows.start;
    return start == nullptr ? PlacedRows{p.first_prompt_row, p.m} : PlacedRows{start[expert], start[expert + 1]};
  }
};

struct PackedRows {
  const uint8_t* data;         // [tiles of 16 rows][blocks][16][32] bf16; an expert's rows begin with a tile
  const int64_t* expert_tile;  // [experts]
  int64_t blocks;

  // `row`: of the expert's.
  const uint8_t* at(int64_t expert, int64_t row, int64_t block) const {
    return data + ((expert_tile[expert] + row / kTileRows) * blocks + block) * kTileBytes;
  }
};

// The rows of prompts after the prologue; what is missing in their last tiles, and in the last block, is zero.
inline PackedRows pack_rows(const GemmParams& p) {
  const int64_t blocks = (p.k + kBlockInputs - 1) / kBlockInputs;
  const int experts = p.expert_rows.experts;
  int64_t* tile = scratch_array<int64_t>(kRowTiles, experts + 1);
  tile[0] = 0;
  for (int expert = 0; expert < experts; ++expert) {
    const PlacedRows rows = PlacedRows::of(p, expert);
    tile[expert + 1] = tile[expert] + (rows.end - rows.begin + kTileRows - 1) / kTileRows;
  }
  auto* data = scratch_array<uint8_t>(kActivations, tile[experts] * blocks * kTileBytes);
  parallel_for(tile[experts] * kTileRows, [&](int64_t begin, int64_t end) {
    auto* x = scratch_array<float>(kRowBuffer, blocks * kBlockInputs);
    std::fill(x + p.k, x + blocks * kBlockInputs, 0.0f);
    int64_t expert = std::upper_bound(tile, tile + experts, begin / kTileRows) - tile - 1;
    for (int64_t row = begin; row < end; ++row) {
      while (row / kTileRows >= tile[expert + 1]) ++expert;
      const PlacedRows rows = PlacedRows::of(p, expert);
      const int64_t place = rows.begin + row - tile[expert] * kTileRows;
      if (place < rows.end) {
        load_row(p, place, x);
      } else {
        std::fill_n(x, p.k, 0.0f);
      }
      uint8_t* out = data + row / kTileRows * blocks * kTileBytes + row % kTileRows * kTileRowBytes;
      for (int64_t block = 0; block < blocks; ++block, out += kTileBytes) store_tile_row(out, x + block * kBlockInputs);
    }
  });
  return {data, tile, blocks};
}

// Weights::unpack(expert, tile, begin, end, out) writes blocks begin .. end - 1 of 16 rows of the expert's weight to
// [end - begin][16][16] pairs of bf16: 16 pairs of inputs by 16 rows. Inputs and rows that do not exist are zero.
template <class Weights>
void run_tile_gemm(const GemmParams& p, const Weights& weights) {
  const PackedRows x = pack_rows(p);
  const int64_t tiles = (p.n + kTileRows - 1) / kTileRows;
  const auto multiply = [&](int64_t expert, int64_t first, int64_t last, int64_t begin, int64_t end) {
    alignas(64) uint8_t panel[kPanelBytes];
    float* sums = scratch_array<float>(kTileSums, kSweepUnits * sums_size(kSweepRows));
    Tiles registers;
    const int64_t place = PlacedRows::of(p, expert).begin;
    for (int64_t row0 = begin; row0 < end; row0 += kSweepRows) {
      const int64_t count = std::min(kSweepRows, end - row0);
      for (int64_t unit0 = first; unit0 < last; unit0 += kSweepUnits) {
        const auto unpack = [&](int64_t unit, int64_t first_block, int64_t last_block) -> TileRows {
          for (int i = 0; i < 2; ++i) {
            const int64_t tile = 2 * (unit0 + unit) + i;
            uint8_t* out = panel + i * kPanelBytes / 2;
            if (tile < tiles) {
              weights.unpack(expert, tile, first_block, last_block, out);
            } else {
              std::fill_n(out, (last_block - first_block) * kTileBytes, uint8_t{0});
            }
          }
          return {panel, kPanelBytes / 2};
        };
        const auto done = [&](int64_t unit, int64_t units, int64_t row, int64_t of_rows) {
          finish(p, expert, {sums, kUnitColumns, sums_size(count), unit0 + unit, units}, row0 + row, of_rows);
        };
        multiply_panels(registers, {x.at(expert, row0 - place, 0), x.blocks * kTileBytes}, count, x.blocks,
                        std::min(kSweepUnits, last - unit0), unpack, sums, done);
      }
    }
  };
  for_each_run(p, (tiles + 1) / 2, p.first_prompt_row, multiply);
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
