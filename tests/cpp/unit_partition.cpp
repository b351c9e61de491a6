// Reads lines of units, rows and threads; prints whole and parts, and the row that each part begins with.
#include "gemm/unit_partition.h"

#include <iostream>

int main() {
  int64_t units, rows, threads;
  while (std::cin >> units >> rows >> threads) {
    const auto partition = fastinfer::cpu::UnitPartition::of(units, rows, threads);
    std::cout << partition.whole << ' ' << partition.parts;
    for (int64_t part = 0; part <= partition.parts; ++part) std::cout << ' ' << partition.first_row(part, rows);
    std::cout << '\n';
  }
}
