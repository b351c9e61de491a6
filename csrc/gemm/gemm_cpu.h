// The common part of the CPU's matrix products: the prologue, the partition of the output, and the epilogue.
//
// The output is cut into units of one tile of 16 weight rows (two where a gated activation follows, gate and up, or
// where a kernel takes two together). A thread gets a contiguous run of units and, for each, sweeps all rows of x in
// blocks: the tile's weights come from memory once and then stay in the cache. Dense weights take several units at once
// (gemm_cpu.cpp). Every output element is summed in one order, whatever m and the number of threads are.
//
// With a stack of experts there are units of every expert that has rows, and each sweeps its expert's rows alone.
#pragma once

#include <algorithm>

#include "common/cpu/parallel.h"
#include "common/cpu/vec.h"
#include "gemm/gemm.h"
#include "gemm/unit_partition.h"

namespace fastinfer::cpu::FASTINFER_ISA {

inline constexpr int kHalves = kTileRows / kLanes;  // vectors that hold a tile's 16 rows
inline constexpr int kRowBlock = 64;                // rows of x that are multiplied at once
inline constexpr int64_t kSweepRows = 512;          // the most rows of x whose sums are kept
inline constexpr int kRowsOfGroups = 8;             // with so few rows, the sums of several units are finished together
inline constexpr int kUnitsOfGroups = kRowBlock / kRowsOfGroups;  // the number of these units
// With so many rows for each thread, it takes all units with its own rows, and not all rows with its own units: the
// rows then stay in its L2 from product to product, which is worth more than reading and unpacking all of the weight.
inline constexpr int64_t kRowsAlone = 128;

// Slots of scratch memory.
enum ScratchSlot { kActivations, kQuantized, kScales, kRowBuffer, kActiveExperts, kRowTiles, kTileSums };

// Rows of x after the prologue, fp32, padded with zeros to a multiple of kLanes and then by a cache line, so that rows
// of a power of two do not share a set of the cache.
struct FloatRows {
  const float* data;
  int64_t stride;
};

// Writes the row of x after the prologue, fp32 and not padded.
void load_row(const GemmParams& p, int64_t row, float* out);

// Calls fn(begin, end) for ranges of the rows that are computed, by their places: all but those of experts elsewhere.
template <class Fn>
void for_each_row_range(const GemmParams& p, const Fn& fn) {
  const ExpertRows& rows = p.expert_rows;
  const int64_t first = rows.start == nullptr ? 0 : rows.start[0];
  const int64_t last = rows.start == nullptr ? p.m : rows.start[rows.experts];
  parallel_for(last - first, [&](int64_t begin, int64_t end) { fn(first + begin, first + end); });
}

// All rows that are computed, in scratch memory.
FloatRows float_rows(const GemmParams& p);

// The sums of units first .. first + count - 1, [rows, stride] of each, `next` elements apart; a unit has `stride` rows
// of the weight.
struct UnitSums {
  const float* data;
  int64_t stride, next = 0;
  int64_t first, count = 1;
};

// The epilogue; expert 0 is also the only weight. Adds the bias, activates or adds the residual, and stores.
void finish(const GemmParams& p, int64_t expert, const UnitSums& sums, int64_t row0, int64_t rows);

// Calls fn(expert, first, last, begin, end) for runs of units, first .. last - 1, that together are all units of all
// experts, with the expert's rows begin .. end - 1: for the experts that have any, so that threads share out evenly
// what there is to do. Without experts the rows are those from `first_row` on, and a run may have a part of them.
template <class Fn>
void for_each_run(const GemmParams& p, int64_t units, int64_t first_row, const Fn& fn) {
  const ExpertRows& rows = p.expert_rows;
  int32_t* active = nullptr;
  int64_t count = 1;  // of experts, or of ranges of rows
  UnitPartition partition{units, 1};
  if (rows.start != nullptr) {
    active = scratch_array<int32_t>(kActiveExperts, rows.experts);
    count = 0;
    for (int32_t expert = 0; expert < rows.experts; ++expert) {
      if (rows.start[expert] < rows.start[expert + 1]) active[count++] = expert;
    }
    partition.whole = count * units;
  } else if (num_threads() > 1 && p.m - first_row >= num_threads() * kRowsAlone) {
    count = num_threads();
    partition.whole = count * units;
  } else {
    partition = UnitPartition::of(units, p.m - first_row, num_threads());
  }
  reached(p.weight_memory.data);
  const auto row_of = [&](int64_t range) {
    return range == count ? p.m : first_row + (p.m - first_row) / kPartRows * range / count * kPartRows;
  };
  // There is one call of fn, to be inlined.
  const auto share_out = [&](int64_t from, int64_t to, int64_t parts) {
    parallel_for((to - from) * parts, [&](int64_t item, int64_t last) {
      while (item < last) {
        const int64_t unit = from + item / parts;
        const int64_t place = count == 1 ? 0 : unit / units;
        const int64_t expert = active == nullptr ? 0 : active[place];
        int64_t begin = active == nullptr ? row_of(place) : rows.start[expert];
        int64_t end = active == nullptr ? row_of(place + 1) : rows.start[expert + 1];
        int64_t stop = std::min(from + last, (place + 1) * units);
        if (parts > 1) {
          const int64_t part = item % parts, num_rows = end - begin;
          end = begin + partition.first_row(part + 1, num_rows);
          begin += partition.first_row(part, num_rows);
          stop = unit + 1;
        }
        fn(expert, unit - place * units, stop - place * units, begin, end);
        item += stop - unit;
      }
    });
  };
  share_out(0, partition.whole, 1);
  share_out(partition.whole, count * units, partition.parts);
}

// The products of all units with all rows, kRows rows at once. multiply(expert, unit, row0, rows, sums, finish) writes
// sums[rows][stride]. It returns whether it has called finish(row, count) for all rows, which depends on `rows` alone.
//
// With few rows, several units' sums are finished together. If each unit were finished alone, the stream of weights
// would stop for as long as the activation's chain of instructions takes. Gate and up with one row took 1.3 times as
// long.
template <int kRows, class Multiply>
void for_each_product(const GemmParams& p, int64_t units, int stride, const Multiply& multiply) {
  static_assert(kRows >= kRowBlock);
  for_each_run(p, units, 0, [&](int64_t expert, int64_t first, int64_t last, int64_t begin, int64_t end) {
    alignas(64) float sums[kRows * 2 * kTileRows];
    const int64_t together = end - begin <= kRowsOfGroups ? kUnitsOfGroups : 1;
    for (int64_t count; first < last; first += count) {
      count = std::min(together, last - first);
      for (int64_t row0 = begin; row0 < end; row0 += kRows) {
        const int rows = static_cast<int>(std::min<int64_t>(kRows, end - row0));
        bool finished = false;
        for (int64_t unit = 0; unit < count; ++unit) {
          float* unit_sums = sums + unit * rows * stride;
          finished = multiply(expert, first + unit, row0, rows, unit_sums, [&](int row, int ready) {
            finish(p, expert, {.data = unit_sums + row * stride, .stride = stride, .first = first + unit}, row0 + row,
                   ready);
          });
        }
        for (int64_t unit = 0; unit < count && !finished; ++unit) {
          finish(p, expert, {.data = sums + unit * rows * stride, .stride = stride, .first = first + unit}, row0, rows);
        }
      }
    }
  });
}

// Kernel::tile<kRows>(tile, row, sums, stride) writes the products of kRows rows of x with the 16 weight rows of a tile
// to sums[kRows][stride]; kMaxRows is the most that it keeps in registers.
//
// Kernel::panel<kTiles>(tile, row, rows, sums, stride, done), if there is one, does so for any number of rows and, side
// by side, kTiles tiles, of 1 to kPanelTiles; it is called for more than kPanelFrom rows, of which it gets at most
// kPanelRows at once. It calls done(begin, count) for rows that are ready: their results, lines of the cache that lie a
// whole row apart, are stored while it computes the next ones. (All at its end took 14 % of the time of QKV at 512
// tokens.)
template <class Kernel>
void run_gemm(const GemmParams& p, const Kernel& kernel) {
  constexpr bool kHasPanel = requires { Kernel::kPanelFrom; };
  constexpr int kRows = [] {
    if constexpr (kHasPanel) return Kernel::kPanelRows;
    return kRowBlock;
  }();
  const int64_t tiles = (p.n + kTileRows - 1) / kTileRows;
  int tiles_per_unit = p.activation != Activation::kNone ? 2 : 1;
  if constexpr (kHasPanel) {
    // Pairs halve the units that threads share out: only where enough are left, and where experts have rows for panels.
    const bool many_rows = p.m > int64_t{Kernel::kPanelFrom} * p.expert_rows.experts;
    const bool many_tiles = tiles / Kernel::kPanelTiles * p.expert_rows.experts >= kUnitsPerThread * num_threads();
    if (many_rows && many_tiles && tiles % Kernel::kPanelTiles == 0) {
      tiles_per_unit = std::max(tiles_per_unit, Kernel::kPanelTiles);
    }
  }
  const int stride = tiles_per_unit * kTileRows;
  // Inlined: a call for each unit cost decoding 1.5 %.
  const auto multiply = [&](int64_t expert, int64_t unit, int64_t row0, int rows, float* sums,
                            const auto& finish_rows) __attribute__((always_inline)) {
    const int64_t tile0 = expert * tiles + unit * tiles_per_unit;
    if constexpr (kHasPanel) {
      if (rows > Kernel::kPanelFrom) {
        const auto panels = [&]<int kTiles>() {
          for (int i = 0; i < tiles_per_unit; i += kTiles) {
            kernel.template panel<kTiles>(tile0 + i, row0, rows, sums + i * kTileRows, stride, [&](int row, int count) {
              if (i + kTiles == tiles_per_unit) finish_rows(row, count);
            });
          }
        };
        tiles_per_unit == Kernel::kPanelTiles ? panels.template operator()<Kernel::kPanelTiles>()
                                              : panels.template operator()<1>();
        return true;
      }
    }
    for (int i = 0; i < tiles_per_unit; ++i) {
      int row = 0;
      const auto step = [&]<int kTogether>() {
        for (; row + kTogether <= rows; row += kTogether) {
          kernel.template tile<kTogether>(tile0 + i, row0 + row, sums + row * stride + i * kTileRows, stride);
        }
      };
      if constexpr (Kernel::kMaxRows >= 8) step.template operator()<8>();
      step.template operator()<4>();
      step.template operator()<2>();
      step.template operator()<1>();
    }
    return false;
  };
  for_each_product<kRows>(p, tiles / tiles_per_unit, stride, multiply);
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
