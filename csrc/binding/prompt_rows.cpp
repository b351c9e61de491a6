#include "binding/prompt_rows.h"

#include <torch/csrc/stable/library.h>

#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

namespace fastinfer {
namespace {

thread_local int64_t first = std::numeric_limits<int64_t>::max();

// Returns the previous value.
int64_t set_first_prompt_row(int64_t value) {
  if (value < 0) {
    throw std::runtime_error("set_first_prompt_row: value must be at least 0, got " + std::to_string(value));
  }
  return std::exchange(first, value);
}

}  // namespace

int64_t first_prompt_row() {
  return first;
}

// There is no tensor argument that could determine the device.
STABLE_TORCH_LIBRARY_IMPL(FASTINFER_NAMESPACE, CompositeExplicitAutograd, m) {
  m.impl("set_first_prompt_row", TORCH_BOX(&set_first_prompt_row));
}

}  // namespace fastinfer
