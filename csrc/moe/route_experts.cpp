#include "moe/route_experts.h"

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>

#include "binding/checks.h"
#include "binding/launch.h"

namespace fastinfer {
namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor> route_experts(const Tensor& logits, int64_t top_k, bool renormalize,
                                                         const std::string& scoring, const std::optional<Tensor>& bias,
                                                         int64_t num_groups, int64_t top_groups, double scale,
                                                         const std::optional<Tensor>& expert_scale, double jitter,
                                                         bool biased_logits) {
  const Checks check("route_experts", logits);
  check.shape(logits, "logits", {kAny, kAny});
  check.rows_contiguous(logits, "logits");
  const DType dtype = check.float_dtype(logits, "logits");
  const int64_t tokens = logits.size(0), experts = logits.size(1);
  check.require(experts >= 1 && experts <= kMostExperts, "logits must have 1 to ", kMostExperts,
                " columns, one per expert, got ", experts);
  const int64_t most = std::min(experts, kMostTopK);
  check.require(top_k >= 1 && top_k <= most, "top_k must be 1 to ", most, ", got ", top_k);
  const bool sparse = scoring == "sparsemixer";
  check.require(sparse || scoring == "softmax" || scoring == "sigmoid",
                "scoring must be softmax, sigmoid or sparsemixer, got ", scoring);
  check.require(!sparse || (!bias && num_groups == 1 && !renormalize),
                "scoring must not be sparsemixer with bias, groups or renormalize");
  check.require(!biased_logits || (bias && num_groups == 1),
                "biased_logits must not be set without bias or with groups");
  check.require(jitter >= 0 && jitter <= 1, "jitter must be in 0 .. 1, got ", jitter);
  const auto vector = [&](const std::optional<Tensor>& values, const char* name) -> const float* {
    if (!values) return nullptr;
    check.shape(*values, name, {experts});
    check.dtype(*values, name, ScalarType::Float);
    check.contiguous(*values, name);
    return static_cast<const float*>(values->data_ptr());
  };
  const float* const bias_data = vector(bias, "bias");
  const float* const expert_scale_data = vector(expert_scale, "expert_scale");
  check.require(num_groups == 1 || (num_groups >= 1 && num_groups <= kMostGroups && experts % num_groups == 0 &&
                                    experts / num_groups >= 2),
                "num_groups must be 1, or at most ", kMostGroups, " and divide the ", experts,
                " experts into groups of at least 2, got ", num_groups);
  check.require(top_groups >= 1 && top_groups <= num_groups && top_k <= top_groups * (experts / num_groups),
                "top_groups must be 1 to ", num_groups, " and have at least top_k = ", top_k, " experts, got ",
                top_groups, " groups of ", experts / num_groups);
  check.require(tokens * top_k <= INT32_MAX, "logits must have fewer than 2^31 / top_k rows, got ", tokens);
  Tensor weights = new_tensor(logits, {tokens, top_k}, ScalarType::Float);
  Tensor ids = new_tensor(logits, {tokens, top_k}, ScalarType::Int);
  Tensor row_ids = new_tensor(logits, {tokens * top_k}, ScalarType::Int);
  Tensor expert_start = new_tensor(logits, {experts + 1}, ScalarType::Int);
  RouteExpertsParams params{
      .logits = logits.data_ptr(),
      .bias = bias_data,
      .expert_scale = expert_scale_data,
      .expert_weights = static_cast<float*>(weights.data_ptr()),
      .expert_ids = static_cast<int32_t*>(ids.data_ptr()),
      .row_ids = static_cast<int32_t*>(row_ids.data_ptr()),
      .expert_start = static_cast<int32_t*>(expert_start.data_ptr()),
      .tokens = tokens,
      .logits_stride = logits.stride(0),
      .experts = static_cast<int>(experts),
      .top_k = static_cast<int>(top_k),
      .num_groups = static_cast<int>(num_groups),
      .top_groups = static_cast<int>(top_groups),
      .biased_logits = biased_logits,
      .sigmoid = scoring == "sigmoid",
      .sparse = sparse,
      .tolerance = static_cast<float>(2 * jitter),
      .renormalize = renormalize,
      .scale = static_cast<float>(scale),
      .dtype = dtype,
  };
  if (gpu_of(logits) != nullptr) params.arrived = arrival_counters(logits, 1);
  FASTINFER_LAUNCH(logits, route_experts, params);
  return {weights, ids, row_ids, expert_start};
}

}  // namespace

FASTINFER_OPERATORS(m) {
  m.impl("route_experts", TORCH_BOX(&route_experts));
}

}  // namespace fastinfer
