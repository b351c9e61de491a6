#include "elementwise/activation_and_mul.h"

#include <cmath>
#include <optional>
#include <vector>

#include "binding/output.h"

namespace fastinfer {
namespace {

Tensor run(const Checks& check, const Output& output, const Tensor& x, Activation activation, bool gated,
           const std::optional<Tensor>& factor = std::nullopt, float limit = 0.0f) {
  check.require(x.dim() >= 1, "x must have at least one dimension, got a scalar");
  const int64_t width = x.size(x.dim() - 1);
  check.require(!gated || width % 2 == 0, "the last dimension of x must be even (gate and up), got ", width);
  check.contiguous(x, "x");
  const DType dtype = check.float_dtype(x, "x");
  const int64_t d = gated ? width / 2 : width;
  const auto sizes = x.sizes();
  std::vector<int64_t> out_sizes(sizes.begin(), sizes.end());
  out_sizes.back() = d;
  const int64_t rows = width > 0 ? x.numel() / width : 0;
  if (factor) {
    check.require(x.dim() == 2, "x must have two dimensions where there is a factor, got ", x.dim());
    check.shape(*factor, "factor", sizes);
    check.dtype(*factor, "factor", x.scalar_type());
    check.rows_contiguous(*factor, "factor");
  }
  const Tensor out = output.tensor(check, x, out_sizes, std::nullopt, {gated ? nullptr : &x});
  const ActivationAndMulParams params{
      .x = x.data_ptr(),
      .up = gated    ? static_cast<const char*>(x.data_ptr()) + d * x.element_size()
            : factor ? factor->data_ptr()
                     : nullptr,
      .out = out.data_ptr(),
      .rows = rows,
      .d = d,
      .x_stride = width,
      .up_stride = gated    ? width
                   : factor ? factor->stride(0)
                            : 0,
      .activation = activation,
      .limit = limit,
      .dtype = dtype,
  };
  FASTINFER_LAUNCH(x, activation_and_mul, params);
  return out;
}

Tensor silu_and_mul(const Output& output, const Tensor& x, const std::optional<double>& limit) {
  const Checks check("silu_and_mul", x);
  const auto bound = static_cast<float>(limit.value_or(0.0));
  check.require(!limit || (bound > 0.0f && std::isfinite(bound)), "limit must be positive and finite in fp32, got ",
                limit.value_or(0.0));
  return run(check, output, x, Activation::kSilu, true, std::nullopt, bound);
}

Tensor run_gelu(const char* op, const Output& output, const Tensor& x, const std::string& approximate, bool gated,
                const std::optional<Tensor>& factor = std::nullopt) {
  const Checks check(op, x);
  check.require(approximate == "tanh" || approximate == "none", "approximate must be 'tanh' or 'none', got '",
                approximate, "'");
  return run(check, output, x, approximate == "tanh" ? Activation::kGeluTanh : Activation::kGelu, gated, factor);
}

Tensor gelu_and_mul(const Output& output, const Tensor& x, const std::string& approximate) {
  return run_gelu("gelu_and_mul", output, x, approximate, true);
}

Tensor gelu(const Output& output, const Tensor& x, const std::string& approximate,
            const std::optional<Tensor>& factor) {
  return run_gelu("gelu", output, x, approximate, false, factor);
}

Tensor clamped_swiglu(const Output& output, const Tensor& x) {
  return run(Checks("clamped_swiglu", x), output, x, Activation::kClampedSwiglu, true);
}

}  // namespace

FASTINFER_OPERATORS(m) {
  impl_with_out<&silu_and_mul>(m, "silu_and_mul");
  impl_with_out<&gelu_and_mul>(m, "gelu_and_mul");
  impl_with_out<&gelu>(m, "gelu");
  impl_with_out<&clamped_swiglu>(m, "clamped_swiglu");
}

}  // namespace fastinfer
