#include "binding/batch_invariant.h"

#include <torch/csrc/stable/library.h>

#include <utility>

namespace fastinfer {
namespace {

thread_local bool invariant = false;

// Returns what it was.
bool set_batch_invariant(bool value) {
  return std::exchange(invariant, value);
}

}  // namespace

bool batch_invariant() {
  return invariant;
}

// It has no tensor to tell the device by.
STABLE_TORCH_LIBRARY_IMPL(FASTINFER_NAMESPACE, CompositeExplicitAutograd, m) {
  m.impl("set_batch_invariant", TORCH_BOX(&set_batch_invariant));
}

}  // namespace fastinfer
