#include "norm/layer_norm.h"

#include "binding/output.h"

namespace fastinfer {
namespace {

Tensor layer_norm(const Output& output, const Tensor& x, const Tensor& weight, const Tensor& bias, double eps) {
  const Checks check("layer_norm", x);
  check.require(x.dim() >= 1, "x must have at least one dimension, got a scalar");
  const int64_t hidden = x.size(x.dim() - 1);
  const DType dtype = check.float_dtype(x, "x");
  check.contiguous(x, "x");
  check.shape(weight, "weight", {hidden});
  check.contiguous(weight, "weight");
  const DType weight_dtype = check.fp32_or(dtype, weight, "weight");
  check.shape(bias, "bias", {hidden});
  check.contiguous(bias, "bias");
  check.dtype(bias, "bias", weight.scalar_type());
  const Tensor out = output.tensor(check, x, x.sizes(), std::nullopt, {&x});
  const LayerNormParams params{
      .x = x.data_ptr(),
      .weight = weight.data_ptr(),
      .bias = bias.data_ptr(),
      .out = out.data_ptr(),
      .rows = hidden > 0 ? x.numel() / hidden : 0,
      .hidden = hidden,
      .eps = static_cast<float>(eps),
      .dtype = dtype,
      .weight_dtype = weight_dtype,
  };
  FASTINFER_LAUNCH(x, layer_norm, params);
  return out;
}

}  // namespace

FASTINFER_OPERATORS(m) {
  impl_with_out<&layer_norm>(m, "layer_norm");
}

}  // namespace fastinfer
