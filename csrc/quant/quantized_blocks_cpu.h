// Iterates over the blocks of a packed weight on the CPU.
#pragma once

#include <algorithm>

#include "common/cpu/dot.h"
#include "gemm/gemm_cpu.h"
#include "quant/quantized_gemm.h"

namespace fastinfer::cpu::FASTINFER_ISA {

// How far ahead weights are prefetched where few rows share them.
inline constexpr int kPrefetchBytes = 2048;

// Calls fn(block, weight, scale, min) over blocks begin .. end - 1 of one tile's inputs, for the half-th vector of its
// rows. With kPrefetch the weights further on, and the next tile's scales and minimums, are prefetched. One loop, which
// loads a group's scales for each of its blocks: a loop over groups around one over blocks cost 5 to 10 % at 16 rows
// with groups of one block.
template <class Format, class Scale, bool kPrefetch = false, class Fn>
FASTINFER_INLINE void for_each_block(const QuantizedGemmParams& p, int64_t tile, int half, int64_t begin, int64_t end,
                                     Fn&& fn) {
  const QuantizedWeight& w = p.weight;
  const int64_t blocks = p.k / kBlockInputs, groups = blocks / w.group_blocks, first = begin / w.group_blocks;
  const int64_t at = (tile * groups + first) * kTileRows + half * kLanes;
  const bool has_min = w.mins != nullptr;
  const Scale* scales = static_cast<const Scale*>(w.scales) + at;
  const Scale* mins = has_min ? static_cast<const Scale*>(w.mins) + at : scales;
  const auto* weight =
      static_cast<const uint8_t*>(w.q) + (tile * blocks + begin) * Format::kBlockBytes + half * kLanes * 4;
  int64_t left = (first + 1) * w.group_blocks - begin;  // blocks of the group
  for (int64_t block = begin; block < end; ++block) {
    const f32v scale = load(scales);
    f32v min = load(mins);
    if (!has_min) min = scale * -Format::kSymmetricOffset;
    if constexpr (kPrefetch) {
      __builtin_prefetch(scales + groups * kTileRows);
      __builtin_prefetch(mins + groups * kTileRows);
    }
    fn(block, weight, scale, min);
    if constexpr (kPrefetch) {
      for (int i = 0; i < Format::kBlockBytes; i += 64) __builtin_prefetch(weight + i + kPrefetchBytes);
    }
    weight += Format::kBlockBytes;
    if (--left == 0) {
      left = w.group_blocks;
      scales += kTileRows;
      mins += kTileRows;
    }
  }
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
