#include "binding/batch_invariant.h"

#include <torch/csrc/stable/library.h>

#include <utility>

namespace fastinfer {
namespace {

thread_local bool invariant = false;

// Returns the previous value.
bool set_batch_invariant(bool value) {
  return std::exchange(invariant, value);
}

}  // namespace

bool batch_invariant() {
  return invariant;
}

// There is no tensor argument that could determine the device.
STABLE_TORCH_LIBRARY_IMPL(FASTINFER_NAMESPACE, CompositeExplicitAutograd, m) {
  m.impl("set_batch_invariant", TORCH_BOX(&set_batch_invariant));
}

}  // namespace fastinfer
