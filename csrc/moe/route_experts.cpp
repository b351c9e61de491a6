#include "moe/route_experts.h"

#include <algorithm>
#include <tuple>

#include "binding/checks.h"
#include "binding/launch.h"

namespace fastinfer {
namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor> route_experts(const Tensor& logits, int64_t top_k, bool renormalize) {
  const Checks check("route_experts", logits);
  check.shape(logits, "logits", {kAny, kAny});
  check.rows_contiguous(logits, "logits");
  const DType dtype = check.float_dtype(logits, "logits");
  const int64_t tokens = logits.size(0), experts = logits.size(1);
  check.require(experts >= 1 && experts <= kMostExperts, "logits must have 1 to ", kMostExperts,
                " columns, one per expert, got ", experts);
  const int64_t most = std::min(experts, kMostTopK);
  check.require(top_k >= 1 && top_k <= most, "top_k must be 1 to ", most, ", got ", top_k);
  check.require(tokens * top_k <= INT32_MAX, "logits must have fewer than 2^31 / top_k rows, got ", tokens);
  Tensor weights = new_tensor(logits, {tokens, top_k}, ScalarType::Float);
  Tensor ids = new_tensor(logits, {tokens, top_k}, ScalarType::Int);
  Tensor row_ids = new_tensor(logits, {tokens * top_k}, ScalarType::Int);
  Tensor expert_start = new_tensor(logits, {experts + 1}, ScalarType::Int);
  const RouteExpertsParams params{
      .logits = logits.data_ptr(),
      .expert_weights = static_cast<float*>(weights.data_ptr()),
      .expert_ids = static_cast<int32_t*>(ids.data_ptr()),
      .row_ids = static_cast<int32_t*>(row_ids.data_ptr()),
      .expert_start = static_cast<int32_t*>(expert_start.data_ptr()),
      .tokens = tokens,
      .logits_stride = logits.stride(0),
      .experts = static_cast<int>(experts),
      .top_k = static_cast<int>(top_k),
      .renormalize = renormalize,
      .dtype = dtype,
  };
  FASTINFER_LAUNCH(logits, route_experts, params);
  return {weights, ids, row_ids, expert_start};
}

}  // namespace

FASTINFER_OPERATORS(m) {
  m.impl("route_experts", TORCH_BOX(&route_experts));
}

}  // namespace fastinfer
