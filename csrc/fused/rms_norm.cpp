#include "fused/rms_norm.h"

#include <tuple>
#include <vector>

#include "common/binding.h"
#include "common/device.h"

namespace fastinfer {
namespace {

enum class Add { kBefore, kAfter };  // the residual: before it is also stored

// Into `out`, or as int8 with `scales`.
void run(const Checks& check, const Tensor& x, const Tensor* residual, Add add, const Tensor& weight, double eps,
         Tensor& out, Tensor* scales) {
  check.require(x.dim() >= 1, "x must have at least one dimension, got a scalar");
  const int64_t hidden = x.size(x.dim() - 1);
  const DType dtype = check.float_dtype(x, "x");
  check.contiguous(x, "x");
  check.shape(weight, "weight", {hidden});
  check.contiguous(weight, "weight");
  if (residual != nullptr) {
    const auto sizes = x.sizes(), residual_sizes = residual->sizes();
    check.require(std::equal(sizes.begin(), sizes.end(), residual_sizes.begin(), residual_sizes.end()),
                  "residual must have the shape of x, ", format_shape(sizes), ", got ", format_shape(residual_sizes));
    check.require(residual->device() == x.device(), "residual must be on the device of the other arguments");
    check.dtype(*residual, "residual", x.scalar_type());
    check.contiguous(*residual, "residual");
  }
  if (scales != nullptr) {
    std::vector<int64_t> rows(x.sizes().begin(), x.sizes().end() - 1);
    *scales = new_tensor(x, rows, ScalarType::Float);
    out = new_tensor(x, x.sizes(), ScalarType::Char);
  } else {
    out = new_tensor(x, x.sizes());
  }
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
  };
  FASTINFER_LAUNCH(x, rms_norm, params);
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps, std::optional<Tensor> residual) {
  Tensor out;
  run(Checks("rms_norm", x), x, residual ? &*residual : nullptr, Add::kAfter, weight, eps, out, nullptr);
  return out;
}

Tensor add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps) {
  Tensor out;
  run(Checks("add_rms_norm", x), x, &residual, Add::kBefore, weight, eps, out, nullptr);
  return out;
}

std::tuple<Tensor, Tensor> rms_norm_quantize(const Tensor& x, std::optional<Tensor> residual, const Tensor& weight,
                                             double eps) {
  Tensor out, scales;
  run(Checks("rms_norm_quantize", x), x, residual ? &*residual : nullptr, Add::kBefore, weight, eps, out, &scales);
  return {out, scales};
}

}  // namespace

FASTINFER_OPERATORS(m) {
  m.impl("rms_norm", TORCH_BOX(&rms_norm));
  m.impl("add_rms_norm", TORCH_BOX(&add_rms_norm));
  m.impl("rms_norm_quantize", TORCH_BOX(&rms_norm_quantize));
}

}  // namespace fastinfer
