#include "quant/quantize_int8.h"

#include <tuple>
#include <vector>

#include "binding/checks.h"
#include "binding/launch.h"

namespace fastinfer {
namespace {

std::tuple<Tensor, Tensor> quantize_int8(const Tensor& x) {
  const Checks check("quantize_int8", x);
  check.require(x.dim() >= 1, "x must have at least one dimension, got a scalar");
  check.contiguous(x, "x");
  const DType dtype = check.float_dtype(x, "x");
  const std::vector<int64_t> rows(x.sizes().begin(), x.sizes().end() - 1);
  Tensor q = new_tensor(x, x.sizes(), ScalarType::Char);
  Tensor scales = new_tensor(x, rows, ScalarType::Float);
  const QuantizeInt8Params params{
      .x = x.data_ptr(),
      .q = static_cast<int8_t*>(q.data_ptr()),
      .scales = static_cast<float*>(scales.data_ptr()),
      .rows = scales.numel(),
      .hidden = x.size(x.dim() - 1),
      .dtype = dtype,
  };
  FASTINFER_LAUNCH(x, quantize_int8, params);
  return {q, scales};
}

}  // namespace

FASTINFER_OPERATORS(m) {
  m.impl("quantize_int8", TORCH_BOX(&quantize_int8));
}

}  // namespace fastinfer
