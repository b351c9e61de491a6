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
  void issue(const Product& product, float* d, size_t count, bool adds, Site site);
  void commit();
  void wait(size_t pending);

 private:
  // Registers that products add to; the registers themselves are poison meanwhile.
  struct Sums {
    float* d;
    std::vector<float> values;
    size_t products;  // under way
    Site site;
  };
  struct Issued {
    Product product;
    Sums* sums;
  };
  Sums& begin(float* d, size_t count, bool adds, Site site);
  void finish(const Issued& issued);

  std::vector<Issued> issued_;               // not committed
  std::vector<std::vector<Issued>> groups_;  // committed, oldest first
  std::vector<std::unique_ptr<Sums>> sums_;
  bool fenced_ = false;
};

}  // namespace emulation
