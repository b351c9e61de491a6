#include "products.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace emulation {
namespace {

constexpr int kPoison = 0xff;

bool is_poison(const void* d, size_t bytes) {
  const auto* const first = static_cast<const unsigned char*>(d);
  return std::all_of(first, first + bytes, [](unsigned char byte) { return byte == kPoison; });
}

}  // namespace

Products::Sums& Products::begin(void* d, size_t bytes, bool adds, Site site) {
  auto at = std::find_if(sums_.begin(), sums_.end(), [&](const auto& sums) { return sums->d == d; });
  if (at == sums_.end()) {
    const auto* const first = static_cast<const std::byte*>(d);
    at = sums_.insert(at, std::make_unique<Sums>(Sums{d, std::vector(first, first + bytes), 0, site}));
    std::memset(d, kPoison, bytes);
    if (!adds) std::fill((*at)->values.begin(), (*at)->values.end(), std::byte{});
  } else if (!adds || !is_poison(d, bytes)) {
    trap("sums are overwritten while a product is under way", site);
  }
  return **at;
}

void Products::issue(const Product& product, void* d, size_t bytes, bool adds, Site site) {
  if (!fenced_) trap("wgmma without wgmma_fence", site);
  Sums& sums = begin(d, bytes, adds, site);
  product.add_half(product, sums.values.data(), 0);
  ++sums.products;
  issued_.push_back({product, &sums});
}

void Products::commit() {
  groups_.push_back(std::exchange(issued_, {}));
}

void Products::finish(const Issued& issued) {
  Sums& sums = *issued.sums;
  issued.product.add_half(issued.product, sums.values.data(), 1);
  if (--sums.products > 0) return;
  if (!is_poison(sums.d, sums.values.size())) trap("sums are overwritten while a product is under way", sums.site);
  std::memcpy(sums.d, sums.values.data(), sums.values.size());
  std::erase_if(sums_, [&](const auto& other) { return other.get() == &sums; });
}

void Products::wait(size_t pending) {
  fenced_ = false;
  while (groups_.size() > pending) {
    for (const Issued& issued : groups_.front()) finish(issued);
    groups_.erase(groups_.begin());
  }
}

}  // namespace emulation
