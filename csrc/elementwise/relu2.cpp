#include "elementwise/relu2.h"

#include <optional>

#include "binding/output.h"

namespace fastinfer {
namespace {

Tensor relu2(const Output& output, const Tensor& x) {
  const Checks check("relu2", x);
  check.contiguous(x, "x");
  const DType dtype = check.float_dtype(x, "x");
  const Tensor out = output.tensor(check, x, x.sizes(), std::nullopt, {&x});
  const Relu2Params params{.x = x.data_ptr(), .out = out.data_ptr(), .count = x.numel(), .dtype = dtype};
  FASTINFER_LAUNCH(x, relu2, params);
  return out;
}

}  // namespace

FASTINFER_OPERATORS(m) {
  impl_with_out<&relu2>(m, "relu2");
}

}  // namespace fastinfer
