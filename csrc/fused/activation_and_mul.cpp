#include "fused/activation_and_mul.h"

#include <vector>

#include "common/binding.h"
#include "common/device.h"

namespace fastinfer {
namespace {

Tensor run(const Checks& check, const Tensor& x, Activation activation) {
  check.require(x.dim() >= 1, "x must have at least one dimension, got a scalar");
  const int64_t width = x.size(x.dim() - 1);
  check.require(width % 2 == 0, "the last dimension of x must be even (gate and up), got ", width);
  check.contiguous(x, "x");
  const DType dtype = check.float_dtype(x, "x");
  const auto sizes = x.sizes();
  std::vector<int64_t> out_sizes(sizes.begin(), sizes.end());
  out_sizes.back() = width / 2;
  Tensor out = new_tensor(x, out_sizes);
  const ActivationAndMulParams params{
      .x = x.data_ptr(),
      .out = out.data_ptr(),
      .rows = width > 0 ? x.numel() / width : 0,
      .d = width / 2,
      .activation = activation,
      .dtype = dtype,
  };
  FASTINFER_LAUNCH(x, activation_and_mul, params);
  return out;
}

Tensor silu_and_mul(const Tensor& x) {
  return run(Checks("silu_and_mul", x), x, Activation::kSilu);
}

Tensor gelu_and_mul(const Tensor& x, const std::string& approximate) {
  const Checks check("gelu_and_mul", x);
  check.require(approximate == "tanh" || approximate == "none", "approximate must be 'tanh' or 'none', got '",
                approximate, "'");
  return run(check, x, approximate == "tanh" ? Activation::kGeluTanh : Activation::kGelu);
}

}  // namespace

FASTINFER_OPERATORS(m) {
  m.impl("silu_and_mul", TORCH_BOX(&silu_and_mul));
  m.impl("gelu_and_mul", TORCH_BOX(&gelu_and_mul));
}

}  // namespace fastinfer
