#include "parallel/all_reduce_add_rms_norm.h"

#include "binding/constant_weights.h"
#include "parallel/group_binding.h"

namespace fastinfer {
namespace {

Tensor all_reduce_add_rms_norm(const Output& output, const Tensor& x, const Tensor& residual, const Tensor& weight,
                               double eps, const Tensor& memory, int64_t rank) {
  const Checks check("all_reduce_add_rms_norm", x);
  const GroupArgument group("all_reduce_add_rms_norm", x, memory, rank);
  check.require(x.dim() >= 1, "x must have at least one dimension, got a scalar");
  const int64_t hidden = x.size(x.dim() - 1);
  const DType dtype = check.float_dtype(x, "x");
  check.contiguous(x, "x");
  check.shape(residual, "residual", x.sizes());
  check.dtype(residual, "residual", x.scalar_type());
  check.contiguous(residual, "residual");
  check.shape(weight, "weight", {hidden});
  check.contiguous(weight, "weight");
  const Tensor out = output.tensor(check, x, x.sizes(), std::nullopt, {&x});
  const AllReduceAddRmsNormParams params{
      .sum =
          {
              .group = group.cpus,
              .peers = group.gpus,
              .x = x.data_ptr(),
              .out = out.data_ptr(),
              .elements = x.numel(),
              .dtype = dtype,
              .rank = static_cast<int>(rank),
          },
      .residual = residual.data_ptr(),
      .weight = weight.data_ptr(),
      .rows = hidden > 0 ? x.numel() / hidden : 0,
      .hidden = hidden,
      .eps = static_cast<float>(eps),
      .weight_dtype = check.fp32_or(dtype, weight, "weight"),
      .constant_weights = constant_weights(),
  };
  FASTINFER_LAUNCH(x, all_reduce_add_rms_norm, params);
  return out;
}

}  // namespace

FASTINFER_OPERATORS(m) {
  impl_with_out<&all_reduce_add_rms_norm>(m, "all_reduce_add_rms_norm");
}

}  // namespace fastinfer
