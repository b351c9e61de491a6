// The products of a warpgroup that one of its threads has issued (common/cuda/wgmma.h).
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "emulator.h"

namespace emulation {

class Products {
 public:
  void fence() {
    fenced_ = true;
  }
  void issue(const Product& product, void* d, size_t bytes, bool adds, Site site);
  void commit();
  void wait(size_t pending);

 private:
  // Registers that products add to; the registers themselves are poison meanwhile.
  struct Sums {
    void* d;
    std::vector<std::byte> values;
    size_t products;  // under way
    Site site;
  };
  struct Issued {
    Product product;
    Sums* sums;
  };
  Sums& begin(void* d, size_t bytes, bool adds, Site site);
  void finish(const Issued& issued);

  std::vector<Issued> issued_;               // not committed
  std::vector<std::vector<Issued>> groups_;  // committed, oldest first
  std::vector<std::unique_ptr<Sums>> sums_;
  bool fenced_ = false;
};

}  // namespace emulation
