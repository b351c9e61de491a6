#include "elementwise/softcap.h"

#include <cfloat>

#include "binding/checks.h"
#include "binding/launch.h"

namespace fastinfer {
namespace {

void softcap(const Tensor& x, double cap) {
  const Checks check("softcap", x);
  check.contiguous(x, "x");
  const DType dtype = check.float_dtype(x, "x");
  const auto cap_fp32 = static_cast<float>(cap);
  check.require(cap_fp32 >= FLT_MIN && cap_fp32 <= FLT_MAX, "cap must be positive and finite in fp32, got ", cap);
  const SoftcapParams params{.x = x.data_ptr(), .count = x.numel(), .cap = cap_fp32, .dtype = dtype};
  FASTINFER_LAUNCH(x, softcap, params);
}

}  // namespace

FASTINFER_OPERATORS(m) {
  m.impl("softcap", TORCH_BOX(&softcap));
}

}  // namespace fastinfer
