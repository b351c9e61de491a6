// LoRA in bf16 tiles, for the rows that are tokens of a prompt (AddLoraParams::first_prompt_row).
//
// Each block's rows of x are packed once into whole tiles. Shrink: a unit of work is a block by 32 rows of A; its
// products are rounded to bf16 and become a step of 32 inputs of the second product. Expand: a thread takes columns of
// B, 32 at a time, for all blocks. Ranks that an adapter does not have count as zero.
#pragma once

#include <algorithm>

#include "common/cpu/tile_products.h"
#include "lora/lora_blocks_cpu.h"

namespace fastinfer::cpu::FASTINFER_ISA {

class TileLora {
 public:
  explicit TileLora(const AddLoraParams& p)
      : p_(p),
        blocks_(p, p.first_prompt_row, kRows),
        steps_((p.in + kTileInputs - 1) / kTileInputs),
        rank_steps_((p.max_rank + kTileInputs - 1) / kTileInputs) {}

  template <class T, class W>
  void run() {
    if (blocks_.count() == 0) return;
    const auto& last = blocks_[blocks_.count() - 1];
    const int64_t tiles = last.tile + (last.count + kTileSide - 1) / kTileSide;
    x_ = scratch_array<uint8_t>(LoraScratch::kX, tiles * steps_ * kTileBytes);
    hidden_ = scratch_array<uint8_t>(LoraScratch::kHidden, tiles * rank_steps_ * kTileBytes);
    parallel_for(blocks_.count() * kBlockTiles, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) pack_rows<T>(blocks_[i / kBlockTiles], i % kBlockTiles);
    });
    parallel_for(blocks_.count() * rank_steps_, [&](int64_t begin, int64_t end) {
      Tiles registers;
      for (int64_t i = begin; i < end; ++i) shrink<W>(registers, blocks_[i / rank_steps_], i % rank_steps_);
    });
    parallel_for((p_.out + kColumns - 1) / kColumns, [&](int64_t begin, int64_t end) {
      Tiles registers;
      for (int64_t block = 0; block < blocks_.count(); ++block) {
        for (int64_t i = begin; i < end; ++i) expand<T, W>(registers, blocks_[block], i * kColumns);
      }
    });
  }

 private:
  static constexpr int kRows = 64;  // of a block; their sums take 8 KB
  static constexpr int kBlockTiles = kRows / kTileSide;
  static constexpr int kColumns = 2 * kTileSide;

  // 16 rows of a block, if it has so many.
  template <class T>
  void pack_rows(const LoraBlocks::Block& block, int64_t tile) const {
    const int64_t first = tile * kTileSide;
    if (first >= block.count) return;
    float* x = scratch_array<float>(LoraScratch::kRowBuffer, steps_ * kTileInputs);
    std::fill_n(x, steps_ * kTileInputs, 0.0f);
    for (int row = 0; row < kTileSide; ++row) {
      if (first + row < block.count) {
        blocks_.load_row<T>(block.first + first + row, x);
      } else {
        std::fill_n(x, p_.in, 0.0f);
      }
      uint8_t* out = x_ + (block.tile + tile) * steps_ * kTileBytes + row * kTileRowBytes;
      for (int64_t step = 0; step < steps_; ++step) store_tile_row(out + step * kTileBytes, x + step * kTileInputs);
    }
  }

  // Ranks 32 step .. 32 step + 31.
  template <class W>
  void shrink(Tiles& registers, const LoraBlocks::Block& block, int64_t step) const {
    const int64_t rank = step * kTileInputs, ranks = std::min<int64_t>(block.rank - rank, kTileInputs);
    if (ranks <= 0) return;
    const W* a = static_cast<const W*>(p_.a) + (block.matrix * p_.max_rank + rank) * p_.in;
    alignas(64) uint8_t panel[kPanelBytes];
    const auto pack = [&](int64_t, int64_t begin, int64_t end) -> TileRows {
      for (int i = 0; i < 2; ++i) {
        const int64_t first = i * kTileSide, input = begin * kTileInputs;
        pack_columns(a + first * p_.in + input, p_.in, std::clamp<int64_t>(ranks - first, 0, kTileSide), p_.in - input,
                     end - begin, panel + i * kPanelBytes / 2);
      }
      return {panel, kPanelBytes / 2};
    };
    alignas(64) float sums[kRows * kTileInputs];
    const auto done = [&](int64_t, int64_t, int64_t first, int64_t count) {
      const int64_t end = first + (count + kTileSide - 1) / kTileSide * kTileSide;  // whole tiles
      for (int64_t row = first; row < end; ++row) {
        float* of_row = sums + (row - first) * kTileInputs;
        std::fill(of_row + ranks, of_row + kTileInputs, 0.0f);  // a NaN of x would spoil what does not exist
        uint8_t* tile = hidden_ + ((block.tile + row / kTileSide) * rank_steps_ + step) * kTileBytes;
        store_tile_row(tile + row % kTileSide * kTileRowBytes, of_row);
      }
    };
    multiply_panels(registers, rows_of(x_, block, steps_), block.count, steps_, 1, pack, sums, done);
  }

  template <class T, class W>
  void expand(Tiles& registers, const LoraBlocks::Block& block, int64_t column) const {
    const W* b = static_cast<const W*>(p_.b) + block.matrix * p_.max_rank * p_.out;
    alignas(64) uint8_t panel[kPanelBytes];
    const auto pack = [&](int64_t, int64_t begin, int64_t end) -> TileRows {
      for (int64_t rank = begin * kTileInputs; rank < end * kTileInputs; rank += 2) {
        uint8_t* out = panel + (rank - begin * kTileInputs) / 2 * kTileRowBytes;
        for (int lane = 0; lane < kColumns; lane += kLanes) {
          const int64_t n = column + lane, lanes = std::clamp<int64_t>(p_.out - n, 0, kLanes);
          f32v pair[2] = {};
          for (int64_t r = rank; r < std::min<int64_t>(rank + 2, block.rank); ++r) {
            pair[r - rank] = load_lanes(b + r * p_.out + n, lanes);
          }
          store_as(out + lane / kTileSide * (kPanelBytes / 2) + lane % kTileSide * 4, bfloat16_pairs(pair[0], pair[1]));
        }
      }
      return {panel, kPanelBytes / 2};
    };
    alignas(64) float sums[kRows * kColumns];
    const auto done = [&](int64_t, int64_t, int64_t first, int64_t count) {
      for (int64_t row = 0; row < count; ++row) {
        for (int i = 0; i < kColumns && column + i < p_.out; i += kTileSide) {
          T* y = blocks_.y_at<T>(block.first + first + row, column + i);
          const float* sum = sums + row * kColumns + i;
          for_each_vector(std::min<int64_t>(kTileSide, p_.out - column - i), [&](int64_t j, int64_t lanes) {
            store_lanes(y + j, load_lanes(y + j, lanes) + load(sum + j), lanes);
          });
        }
      }
    };
    const int64_t steps = (block.rank + kTileInputs - 1) / kTileInputs;
    multiply_panels(registers, rows_of(hidden_, block, rank_steps_), block.count, steps, 1, pack, sums, done);
  }

  static TileRows rows_of(const uint8_t* tiles, const LoraBlocks::Block& block, int64_t steps) {
    return {tiles + block.tile * steps * kTileBytes, steps * kTileBytes};
  }

  const AddLoraParams& p_;
  const LoraBlocks blocks_;
  const int64_t steps_, rank_steps_;
  uint8_t* x_ = nullptr;       // [tiles][steps_][16][32] bf16
  uint8_t* hidden_ = nullptr;  // [tiles][rank_steps_][16][32] bf16
};

}  // namespace fastinfer::cpu::FASTINFER_ISA
