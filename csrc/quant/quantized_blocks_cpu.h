// How the CPU goes through a packed weight, block by block.
#pragma once

#include <algorithm>

#include "common/cpu/dot.h"
#include "fused/gemm_cpu.h"

namespace fastinfer::cpu::FASTINFER_ISA {

// How far ahead weights are prefetched where few rows share them.
inline constexpr int kPrefetchBytes = 2048;

// Calls fn(block, weight, scale, min) over blocks begin .. end - 1 of one tile's inputs, for the half-th vector of its
// rows. With kPrefetch the weights further on, and the next tile's scales and minimums, are prefetched.
template <class Format, class Scale, bool kPrefetch = false, class Fn>
FASTINFER_INLINE void for_each_block(const QuantizedGemmParams& p, int64_t tile, int half, int64_t begin, int64_t end,
                                     Fn&& fn) {
  const QuantizedWeight& w = p.weight;
  const int64_t blocks = p.k / kBlockInputs, groups = blocks / w.group_blocks;
  const int64_t first = tile * groups * kTileRows + half * kLanes;
  const Scale* scales = static_cast<const Scale*>(w.scales) + first;
  const Scale* mins = w.mins != nullptr ? static_cast<const Scale*>(w.mins) + first : nullptr;
  const auto* weight = static_cast<const uint8_t*>(w.q) + tile * blocks * Format::kBlockBytes + half * kLanes * 4;
  for (int64_t block = begin, group = begin / w.group_blocks; block < end; ++group) {
    const f32v scale = load(scales + group * kTileRows);
    const f32v min = mins != nullptr ? load(mins + group * kTileRows) : scale * -Format::kSymmetricOffset;
    if constexpr (kPrefetch) {
      __builtin_prefetch(scales + (group + groups) * kTileRows);
      if (mins != nullptr) __builtin_prefetch(mins + (group + groups) * kTileRows);
    }
    for (const int64_t stop = std::min(end, (group + 1) * w.group_blocks); block < stop; ++block) {
      const uint8_t* at = weight + block * Format::kBlockBytes;
      fn(block, at, scale, min);
      if constexpr (kPrefetch) {
        for (int i = 0; i < Format::kBlockBytes; i += 64) __builtin_prefetch(at + i + kPrefetchBytes);
      }
    }
  }
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
