#include "quant/w8a8_gemm.h"

#include "binding/batch_invariant.h"
#include "binding/constant_weights.h"
#include "gemm/gemm_binding.h"
#include "quant/quantized_weight_binding.h"

namespace fastinfer {
namespace {

Tensor w8a8_gemm(const Output& output, const Tensor& x, const Tensor& x_scales, const Tensor& qweight,
                 const Tensor& scales, int64_t out_features, const std::optional<Tensor>& bias,
                 const std::optional<std::string>& activation, const std::optional<Tensor>& residual,
                 ScalarType dtype) {
  const Checks check("w8a8_gemm", x);
  const QuantizedWeight weight = quantized_weight(check, qweight, scales, std::nullopt, out_features, 8);
  const int64_t n = out_features, k = qweight.size(1) * kBlockInputs;
  check.require(weight.groups == 1, "scales must have one group, got ", weight.groups);
  check.require(k <= kMostW8a8Inputs, "qweight must have at most ", kMostW8a8Inputs, " inputs, got ", k);
  check.shape(x, "x", {kAny, k});
  check.dtype(x, "x", ScalarType::Char);
  check.contiguous(x, "x");
  const int64_t m = x.size(0);
  check.shape(x_scales, "x_scales", {m});
  check.dtype(x_scales, "x_scales", ScalarType::Float);
  check.contiguous(x_scales, "x_scales");
  W8a8GemmParams params{};
  params.dtype = check.float_dtype(dtype, "dtype");
  params.activation = parse_activation(check, activation);
  const bool gated = params.activation != Activation::kNone;
  check_gated(check, gated, n);
  check.require(!gated || !residual, "activation and residual must not be given together");
  if (residual) {
    check.shape(*residual, "residual", {m, n});
    check.dtype(*residual, "residual", dtype);
    check.contiguous(*residual, "residual");
    params.residual = residual->data_ptr();
  }
  if (bias) {
    check.shape(*bias, "bias", {n});
    check.contiguous(*bias, "bias");
    params.bias = {bias->data_ptr(), check.fp32_or(params.dtype, *bias, "bias")};
  }
  const Tensor out = output.tensor(check, x, {m, gated ? n / 2 : n}, dtype, {residual ? &*residual : nullptr});
  Tensor sums;
  params.x = x.data_ptr();
  params.out = out.data_ptr();
  params.m = m;
  params.n = n;
  params.k = params.x_stride = k;
  params.weight = weight;
  params.weight_memory = memory_of(qweight);
  params.first_prompt_row = m < kFewestTileRows ? m : 0;
  params.x_scales = static_cast<const float*>(x_scales.data_ptr());
  if (m == 0) return out;
  if (const cuda::Device* const gpu = gpu_of(x)) {
    check_aligned(check, x, "x");
    check_quantized_aligned(check, qweight, scales, std::nullopt);
    params.constant_weights = constant_weights();
    params.w8a8_plan = cuda::plan_w8a8_gemm(m, n, k, *gpu, batch_invariant());
    if (params.w8a8_plan.splits > 1) {
      sums = new_tensor(x, {static_cast<int64_t>(params.w8a8_plan.workspace_ints)}, ScalarType::Int);
      params.sums = static_cast<int32_t*>(sums.data_ptr());
      params.counters = arrival_counters(x, params.w8a8_plan.units);
    }
  }
  FASTINFER_LAUNCH(x, w8a8_gemm, params);
  return out;
}

}  // namespace

FASTINFER_OPERATORS(m) {
  impl_with_out<&w8a8_gemm>(m, "w8a8_gemm");
}

}  // namespace fastinfer
