#include "moe/combine_experts.h"

#include "binding/output.h"

namespace fastinfer {
namespace {

Tensor combine_experts(const Output& output, const Tensor& x, const Tensor& expert_weights,
                       const std::optional<Tensor>& residual, const std::optional<Tensor>& expert_ids, int64_t start,
                       int64_t end) {
  const Checks check("combine_experts", x);
  check.shape(expert_weights, "expert_weights", {kAny, kAny});
  check.dtype(expert_weights, "expert_weights", ScalarType::Float);
  check.contiguous(expert_weights, "expert_weights");
  const int64_t tokens = expert_weights.size(0), top_k = expert_weights.size(1);
  check.require(top_k >= 1, "expert_weights must have at least one column, got 0");
  check.shape(x, "x", {tokens * top_k, kAny});
  check.contiguous(x, "x");
  const DType dtype = check.float_dtype(x, "x");
  const int64_t hidden = x.size(1);
  if (residual) {
    check.shape(*residual, "residual", {tokens, hidden});
    check.dtype(*residual, "residual", x.scalar_type());
    check.contiguous(*residual, "residual");
  }
  if (expert_ids) {
    check.shape(*expert_ids, "expert_ids", {tokens, top_k});
    check.dtype(*expert_ids, "expert_ids", ScalarType::Int);
    check.contiguous(*expert_ids, "expert_ids");
  }
  const Tensor out = output.tensor(check, x, {tokens, hidden}, std::nullopt, {residual ? &*residual : nullptr});
  const CombineExpertsParams params{
      .x = x.data_ptr(),
      .expert_weights = static_cast<const float*>(expert_weights.data_ptr()),
      .expert_ids = expert_ids ? static_cast<const int32_t*>(expert_ids->data_ptr()) : nullptr,
      .residual = residual ? residual->data_ptr() : nullptr,
      .out = out.data_ptr(),
      .tokens = tokens,
      .hidden = hidden,
      .start = start,
      .end = end,
      .top_k = static_cast<int>(top_k),
      .dtype = dtype,
  };
  FASTINFER_LAUNCH(x, combine_experts, params);
  return out;
}

}  // namespace

FASTINFER_OPERATORS(m) {
  impl_with_out<&combine_experts>(m, "combine_experts");
}

}  // namespace fastinfer
