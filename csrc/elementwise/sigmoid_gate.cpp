#include "elementwise/sigmoid_gate.h"

#include "binding/output.h"

namespace fastinfer {
namespace {

Tensor run(const Checks& check, const Output& output, const Tensor& x, const Tensor& gate, bool softplus) {
  check.shape(x, "x", {kAny, kAny});
  check.contiguous(x, "x");
  const DType dtype = check.float_dtype(x, "x");
  check.shape(gate, "gate", {x.size(0), kAny});
  const int64_t width = x.size(1), groups = gate.size(1);
  check.require(groups == width || (groups > 0 && width % groups == 0),
                "gate must have a number of columns that divides ", width, ", the width of x, got ", groups);
  check.dtype(gate, "gate", x.scalar_type());
  check.rows_contiguous(gate, "gate");
  const Tensor out = output.tensor(check, x, x.sizes(), std::nullopt, {&x});
  const SigmoidGateParams params{
      .x = x.data_ptr(),
      .gate = gate.data_ptr(),
      .out = out.data_ptr(),
      .rows = x.size(0),
      .width = width,
      .group_width = groups == width ? 1 : width / groups,
      .gate_stride = gate.stride(0),
      .softplus = softplus,
      .dtype = dtype,
  };
  FASTINFER_LAUNCH(x, sigmoid_gate, params);
  return out;
}

Tensor sigmoid_gate(const Output& output, const Tensor& x, const Tensor& gate) {
  return run(Checks("sigmoid_gate", x), output, x, gate, false);
}

Tensor softplus_gate(const Output& output, const Tensor& x, const Tensor& gate) {
  return run(Checks("softplus_gate", x), output, x, gate, true);
}

}  // namespace

FASTINFER_OPERATORS(m) {
  impl_with_out<&sigmoid_gate>(m, "sigmoid_gate");
  impl_with_out<&softplus_gate>(m, "softplus_gate");
}

}  // namespace fastinfer
