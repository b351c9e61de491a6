// How threads share the units of a matrix product that has many rows and few units.
#pragma once

#include <algorithm>
#include <cstdint>

namespace fastinfer::cpu {

inline constexpr int64_t kUnitsPerThread = 8;  // so many that one more or less does not show
inline constexpr int64_t kPartRows = 32;       // a range of rows begins at a multiple of these
// With fewer rows a unit takes so few microseconds that a second job costs what it saves.
inline constexpr int64_t kFewestCutRows = 256;
// Each range of rows unpacks the unit's weights again, which takes as long as the products with about so many rows: in
// tiles 0.2 cycles a weight against 1/512 a product, in vectors less.
inline constexpr int64_t kUnpackRows = 96;

// The first `whole` units are shared out as they are. Those that are left once every thread has as many as the others
// are then cut into `parts` ranges of rows each, so that no thread waits for the one that has a unit more.
struct UnitPartition {
  int64_t whole, parts;

  static constexpr UnitPartition of(int64_t units, int64_t rows, int64_t threads) {
    const int64_t rest = units % threads;
    if (rest == 0 || rows < kFewestCutRows || units >= kUnitsPerThread * threads) return {units, 1};
    int64_t best = 1;
    for (int64_t parts = 2; parts <= std::min(threads, rows / kPartRows); ++parts) {
      if (rounds(rest, parts, rows, threads) < rounds(rest, best, rows, threads)) best = parts;
    }
    return best == 1 ? UnitPartition{units, 1} : UnitPartition{units - rest, best};
  }

  // The row that a unit's part begins with, and the end of the one before.
  constexpr int64_t first_row(int64_t part, int64_t rows) const {
    return std::min(rows, (rows + kPartRows - 1) / kPartRows * part / parts * kPartRows);
  }

 private:
  // How long the busiest thread works on `units` that are cut, in rows.
  static constexpr int64_t rounds(int64_t units, int64_t parts, int64_t rows, int64_t threads) {
    const int64_t blocks = (rows + kPartRows - 1) / kPartRows, largest = (blocks + parts - 1) / parts * kPartRows;
    return (units * parts + threads - 1) / threads * (largest + kUnpackRows);
  }
};

}  // namespace fastinfer::cpu
