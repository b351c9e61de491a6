#include "elementwise/xielu.h"

#include <cmath>
#include <optional>

#include "binding/output.h"

namespace fastinfer {
namespace {

Tensor xielu(const Output& output, const Tensor& x, double positive, double negative, double beta, double eps) {
  const Checks check("xielu", x);
  check.contiguous(x, "x");
  const DType dtype = check.float_dtype(x, "x");
  const auto finite = [&](double value, const char* name) {
    check.require(std::isfinite(static_cast<float>(value)), name, " must be finite in fp32, got ", value);
    return static_cast<float>(value);
  };
  check.require(eps <= 0.0 && eps >= -1.0, "eps must be in -1 .. 0, got ", eps);
  const Tensor out = output.tensor(check, x, x.sizes(), std::nullopt, {&x});
  const XieluParams params{
      .x = x.data_ptr(),
      .out = out.data_ptr(),
      .count = x.numel(),
      .positive = finite(positive, "positive"),
      .negative = finite(negative, "negative"),
      .beta = finite(beta, "beta"),
      .eps = static_cast<float>(eps),
      .dtype = dtype,
  };
  FASTINFER_LAUNCH(x, xielu, params);
  return out;
}

}  // namespace

FASTINFER_OPERATORS(m) {
  impl_with_out<&xielu>(m, "xielu");
}

}  // namespace fastinfer
