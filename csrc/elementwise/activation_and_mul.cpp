#include "elementwise/activation_and_mul.h"

#include <vector>

#include "binding/output.h"

namespace fastinfer {
namespace {

Tensor run(const Checks& check, const Output& output, const Tensor& x, Activation activation, bool gated) {
  check.require(x.dim() >= 1, "x must have at least one dimension, got a scalar");
  const int64_t width = x.size(x.dim() - 1);
  check.require(!gated || width % 2 == 0, "the last dimension of x must be even (gate and up), got ", width);
  check.contiguous(x, "x");
  const DType dtype = check.float_dtype(x, "x");
  const int64_t d = gated ? width / 2 : width;
  const auto sizes = x.sizes();
  std::vector<int64_t> out_sizes(sizes.begin(), sizes.end());
  out_sizes.back() = d;
  const Tensor out = output.tensor(check, x, out_sizes, std::nullopt, {gated ? nullptr : &x});
  const ActivationAndMulParams params{
      .x = x.data_ptr(),
      .out = out.data_ptr(),
      .rows = width > 0 ? x.numel() / width : 0,
      .d = d,
      .activation = activation,
      .gated = gated,
      .dtype = dtype,
  };
  FASTINFER_LAUNCH(x, activation_and_mul, params);
  return out;
}

Tensor silu_and_mul(const Output& output, const Tensor& x) {
  return run(Checks("silu_and_mul", x), output, x, Activation::kSilu, true);
}

Tensor run_gelu(const char* op, const Output& output, const Tensor& x, const std::string& approximate, bool gated) {
  const Checks check(op, x);
  check.require(approximate == "tanh" || approximate == "none", "approximate must be 'tanh' or 'none', got '",
                approximate, "'");
  return run(check, output, x, approximate == "tanh" ? Activation::kGeluTanh : Activation::kGelu, gated);
}

Tensor gelu_and_mul(const Output& output, const Tensor& x, const std::string& approximate) {
  return run_gelu("gelu_and_mul", output, x, approximate, true);
}

Tensor gelu(const Output& output, const Tensor& x, const std::string& approximate) {
  return run_gelu("gelu", output, x, approximate, false);
}

}  // namespace

FASTINFER_OPERATORS(m) {
  impl_with_out<&silu_and_mul>(m, "silu_and_mul");
  impl_with_out<&gelu_and_mul>(m, "gelu_and_mul");
  impl_with_out<&gelu>(m, "gelu");
}

}  // namespace fastinfer
