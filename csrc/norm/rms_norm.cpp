#include "norm/rms_norm.h"

#include <tuple>
#include <vector>

#include "binding/checks.h"
#include "binding/constant_weights.h"
#include "binding/launch.h"
#include "binding/output.h"

namespace fastinfer {
namespace {

enum class Add { kBefore, kAfter };  // the residual: before it is also stored

// Into `output`, or as int8 with `scales`.
Tensor run(const Checks& check, const Tensor& x, const Tensor* residual, Add add, const Tensor& weight, double eps,
           const Output& output, Tensor* scales = nullptr, double factor = 1.0) {
  check.require(x.dim() >= 1, "x must have at least one dimension, got a scalar");
  const int64_t hidden = x.size(x.dim() - 1);
  const DType dtype = check.float_dtype(x, "x");
  check.contiguous(x, "x");
  check.shape(weight, "weight", {hidden});
  check.contiguous(weight, "weight");
  if (residual != nullptr) {
    check.shape(*residual, "residual", x.sizes());
    check.dtype(*residual, "residual", x.scalar_type());
    check.contiguous(*residual, "residual");
  }
  if (scales != nullptr) {
    std::vector<int64_t> rows(x.sizes().begin(), x.sizes().end() - 1);
    *scales = new_tensor(x, rows, ScalarType::Float);
  }
  const ScalarType out_dtype = scales != nullptr ? ScalarType::Char : x.scalar_type();
  const Tensor out = output.tensor(check, x, x.sizes(), out_dtype, {&x, add == Add::kAfter ? residual : nullptr});
  void* const residual_data = residual != nullptr ? residual->data_ptr() : nullptr;
  const RmsNormParams params{
      .x = x.data_ptr(),
      .residual = add == Add::kBefore ? residual_data : nullptr,
      .addend = add == Add::kAfter ? residual_data : nullptr,
      .weight = weight.data_ptr(),
      .out = out.data_ptr(),
      .scales = scales != nullptr ? static_cast<float*>(scales->data_ptr()) : nullptr,
      .rows = scales != nullptr ? scales->numel()
              : hidden > 0      ? x.numel() / hidden
                                : 0,
      .hidden = hidden,
      .eps = static_cast<float>(eps),
      .dtype = dtype,
      .weight_dtype = check.fp32_or(dtype, weight, "weight"),
      .factor = static_cast<float>(factor),
      .constant_weights = constant_weights(),
  };
  FASTINFER_LAUNCH(x, rms_norm, params);
  return out;
}

Tensor rms_norm(const Output& output, const Tensor& x, const Tensor& weight, double eps,
                const std::optional<Tensor>& residual, double factor) {
  return run(Checks("rms_norm", x), x, residual ? &*residual : nullptr, Add::kAfter, weight, eps, output, nullptr,
             factor);
}

Tensor add_rms_norm(const Output& output, const Tensor& x, const Tensor& residual, const Tensor& weight, double eps) {
  return run(Checks("add_rms_norm", x), x, &residual, Add::kBefore, weight, eps, output);
}

std::tuple<Tensor, Tensor> rms_norm_quantize(const Tensor& x, std::optional<Tensor> residual, const Tensor& weight,
                                             double eps) {
  Tensor scales;
  const Checks check("rms_norm_quantize", x);
  const Tensor out = run(check, x, residual ? &*residual : nullptr, Add::kBefore, weight, eps, Output(), &scales);
  return {out, scales};
}

}  // namespace

FASTINFER_OPERATORS(m) {
  impl_with_out<&rms_norm>(m, "rms_norm");
  impl_with_out<&add_rms_norm>(m, "add_rms_norm");
  m.impl("rms_norm_quantize", TORCH_BOX(&rms_norm_quantize));
}

}  // namespace fastinfer
