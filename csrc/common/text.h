// Text of error messages.
#pragma once

#include <cstdio>
#include <string>
#include <type_traits>

namespace fastinfer {

// The parts one after another: text and numbers. Streams are avoided: in a build by GCC 13.3 they crashed at numbers,
// for a reason that was not found.
template <class... Parts>
std::string concatenate(const Parts&... parts) {
  std::string text;
  const auto add = [&]<class Part>(const Part& part) {
    if constexpr (std::is_floating_point_v<Part>) {
      char number[32];
      std::snprintf(number, sizeof number, "%g", static_cast<double>(part));
      text += number;
    } else if constexpr (std::is_integral_v<Part>) {
      text += std::to_string(part);
    } else {
      text += part;
    }
  };
  (add(parts), ...);
  return text;
}

}  // namespace fastinfer
