#include "block_order.h"

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <utility>

namespace emulation {
namespace {

bool descending = false;
std::optional<uint64_t> seed;

}  // namespace

std::vector<uint32_t> block_order(uint32_t count) {
  std::vector<uint32_t> order(count);
  std::iota(order.begin(), order.end(), 0u);
  if (descending) std::reverse(order.begin(), order.end());
  if (seed) {
    std::mt19937_64 random(*seed);
    for (uint32_t i = count; i > 1; --i) std::swap(order[i - 1], order[random() % i]);
  }
  return order;
}

}  // namespace emulation

bool emulation_set_block_order(const char* order) {
  const std::string text(order), random = "random:";
  const bool shuffled = text.starts_with(random) && text.size() > random.size() &&
                        text.find_first_not_of("0123456789", random.size()) == std::string::npos;
  if (!shuffled && text != "ascending" && text != "descending") return false;
  emulation::descending = text == "descending";
  emulation::seed =
      shuffled ? std::optional<uint64_t>(std::strtoull(order + random.size(), nullptr, 10)) : std::nullopt;
  return true;
}
