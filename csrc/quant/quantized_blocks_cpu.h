// Iterates over the blocks of a packed weight on the CPU.
#pragma once

#include <algorithm>

#include "common/cpu/dot.h"
#include "gemm/gemm_cpu.h"
#include "quant/quantized_gemm.h"

namespace fastinfer::cpu::FASTINFER_ISA {

// How far ahead weights are prefetched where few rows share them.
inline constexpr int kPrefetchBytes = 4096;

// The scales or minimums of a weight's groups, from one tile on, for the half-th vector of its rows. T is their type in
// memory: float, Float16, or TwoLevel<inputs of a group>.
template <class T>
class GroupScales {
 public:
  GroupScales(const void* data, int64_t tile, int64_t groups, int half)
      : first_(static_cast<const T*>(data) + tile * groups * kTileRows + half * kLanes) {}

  FASTINFER_INLINE f32v operator[](int64_t group) const {
    return load(first_ + group * kTileRows);
  }

  FASTINFER_INLINE void prefetch(int64_t group) const {
    __builtin_prefetch(first_ + group * kTileRows);
  }

 private:
  const T* first_;
};

// An int8 times an fp16 that the groups of 256 inputs share. Both lie together: 16 fp16, then 16 int8 for each group.
template <int kGroup>
class GroupScales<TwoLevel<kGroup> > {
 public:
  GroupScales(const void* data, int64_t tile, int64_t groups, int half)
      : first_(static_cast<const uint8_t*>(data) + tile * (groups / kGroups) * kBytes), half_(half) {}

  FASTINFER_INLINE f32v operator[](int64_t group) const {
    return span(group / kGroups)[group % kGroups];
  }

  // The scales of 256 inputs; their fp16 are converted once.
  class Span {
   public:
    FASTINFER_INLINE Span(const uint8_t* both, int half)
        : factors_(load(reinterpret_cast<const Float16*>(both) + half * kLanes)),
          integers_(reinterpret_cast<const int8_t*>(both) + 2 * kTileRows + half * kLanes) {}

    FASTINFER_INLINE f32v operator[](int64_t group) const {
      return load(integers_ + group * kTileRows) * factors_;
    }

   private:
    f32v factors_;
    const int8_t* integers_;
  };

  FASTINFER_INLINE Span span(int64_t number) const {
    return {first_ + number * kBytes, half_};
  }

  FASTINFER_INLINE void prefetch(int64_t group) const {
    __builtin_prefetch(first_ + group / kGroups * kBytes + group % kGroups * kTileRows);
  }

 private:
  static constexpr uint64_t kGroups = TwoLevel<kGroup>::kGroups, kBytes = (2 + kGroups) * kTileRows;
  const uint8_t* first_;
  int half_;
};

// A block's scales, kScales of its format, and minimum. With two scales there is no minimum.
template <class Format>
struct BlockScales {
  f32v scale[Format::kScales], min;
};

template <class Scale>
inline constexpr bool kTwoLevels = false;

template <int kGroup>
inline constexpr bool kTwoLevels<TwoLevel<kGroup> > = true;

// for_each_block for scales of two levels: a loop over 256 inputs, whose fp16 are converted once, around one over their
// blocks. The scales are not prefetched: most of the requests were for lines already on their way, and one row was 5 %
// slower from memory with them.
template <class Format, class Scale, bool kPrefetch, class Fn>
FASTINFER_INLINE void for_each_two_level_block(const QuantizedGemmParams& p, int64_t tile, int half, int64_t begin,
                                               int64_t end, Fn&& fn) {
  const QuantizedWeight& w = p.weight;
  constexpr int kScales = Format::kScales;
  constexpr int64_t kSpanBlocks = kTwoLevelInputs / kBlockInputs;
  const int64_t blocks = p.k / kBlockInputs;
  const bool has_min = w.mins != nullptr;
  const GroupScales<Scale> scales(w.scales, tile, blocks * kScales, half);
  const GroupScales<Scale> mins(has_min ? w.mins : w.scales, tile, blocks * kScales, half);
  const auto* weight =
      static_cast<const uint8_t*>(w.q) + (tile * blocks + begin) * Format::kBlockBytes + half * kLanes * 4;
  for (int64_t block = begin; block < end;) {
    const int64_t number = block / kSpanBlocks, stop = std::min(end, (number + 1) * kSpanBlocks);
    const auto span = scales.span(number), min_span = mins.span(number);
    for (; block < stop; ++block, weight += Format::kBlockBytes) {
      const int64_t group = block % kSpanBlocks * kScales;
      BlockScales<Format> of_block{};
#pragma GCC unroll 2
      for (int s = 0; s < kScales; ++s) of_block.scale[s] = span[group + s];
      if constexpr (kScales == 1) {
        of_block.min = has_min ? min_span[group] : of_block.scale[0] * -Format::kSymmetricOffset;
      }
      fn(block, weight, of_block);
      if constexpr (kPrefetch) {
        for (int i = 0; i < Format::kBlockBytes; i += 64) __builtin_prefetch(weight + i + kPrefetchBytes);
      }
    }
  }
}

// Calls fn(block, weight, scales) over blocks begin .. end - 1 of one tile's inputs, for the half-th vector of its
// rows. With kPrefetch the weights further on, and the next tile's scales and minimums, are prefetched. One loop, which
// loads a group's scales for each of its blocks: a loop over groups around one over blocks cost 5 to 10 % at 16 rows
// with groups of one block.
template <class Format, class Scale, bool kPrefetch = false, class Fn>
FASTINFER_INLINE void for_each_block(const QuantizedGemmParams& p, int64_t tile, int half, int64_t begin, int64_t end,
                                     Fn&& fn) {
  if constexpr (kTwoLevels<Scale>)
    return for_each_two_level_block<Format, Scale, kPrefetch>(p, tile, half, begin, end, fn);
  const QuantizedWeight& w = p.weight;
  constexpr int kScales = Format::kScales;
  const int64_t blocks = p.k / kBlockInputs, groups = blocks / w.group_blocks * kScales;
  const bool has_min = w.mins != nullptr;
  const GroupScales<Scale> scales(w.scales, tile, groups, half), mins(has_min ? w.mins : w.scales, tile, groups, half);
  const auto* weight =
      static_cast<const uint8_t*>(w.q) + (tile * blocks + begin) * Format::kBlockBytes + half * kLanes * 4;
  int64_t group = begin / w.group_blocks, left = (group + 1) * w.group_blocks - begin;  // blocks of the group
  for (int64_t block = begin; block < end; ++block) {
    BlockScales<Format> of_block{};
#pragma GCC unroll 2
    for (int s = 0; s < kScales; ++s) of_block.scale[s] = scales[group * kScales + s];
    if constexpr (kScales == 1) {
      of_block.min = mins[group];
      if (!has_min) of_block.min = of_block.scale[0] * -Format::kSymmetricOffset;
    }
    if constexpr (kPrefetch) {
      scales.prefetch(group * kScales + groups);
      if constexpr (kScales == 1) mins.prefetch(group + groups);
    }
    fn(block, weight, of_block);
    if constexpr (kPrefetch) {
      for (int i = 0; i < Format::kBlockBytes; i += 64) __builtin_prefetch(weight + i + kPrefetchBytes);
    }
    weight += Format::kBlockBytes;
    if (--left == 0) {
      left = w.group_blocks;
      ++group;
    }
  }
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
