#include "binding/constant_weights.h"

#include <torch/csrc/stable/library.h>

#include <utility>

namespace fastinfer {
namespace {

thread_local bool constant = false;

// Returns the previous value.
bool set_constant_weights(bool value) {
  return std::exchange(constant, value);
}

}  // namespace

bool constant_weights() {
  return constant;
}

// There is no tensor argument that could determine the device.
STABLE_TORCH_LIBRARY_IMPL(FASTINFER_NAMESPACE, CompositeExplicitAutograd, m) {
  m.impl("set_constant_weights", TORCH_BOX(&set_constant_weights));
}

}  // namespace fastinfer
