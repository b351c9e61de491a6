#include "common/dependent_launches.h"

#include <torch/csrc/stable/library.h>

// There is no tensor argument that could determine the device.
STABLE_TORCH_LIBRARY_IMPL(FASTINFER_NAMESPACE, CompositeExplicitAutograd, m) {
  m.impl("set_dependent_launches", TORCH_BOX(&fastinfer::set_dependent_launches));
}
