#include "linear_attention/mamba2_scan.h"

#include "binding/output.h"
#include "linear_attention/state_slots_binding.h"

namespace fastinfer {
namespace {

Tensor mamba2_scan(const Output& output, const Tensor& xbc, const Tensor& z, const Tensor& dt, const Tensor& a_log,
                   const Tensor& dt_bias, const Tensor& d, const std::optional<Tensor>& norm_weight, double eps,
                   double dt_min, double dt_max, const Tensor& ssm_state, const Tensor& query_start,
                   const Tensor& state_reads, const Tensor& state_writes) {
  const Checks check("mamba2_scan", xbc);
  check.shape(xbc, "xbc", {kAny, kAny});
  check.rows_contiguous(xbc, "xbc");
  const DType dtype = check.float_dtype(xbc, "xbc");
  const int64_t tokens = xbc.size(0);
  check.shape(ssm_state, "ssm_state", {kAny, kAny, kAny, kAny});
  check.dtype(ssm_state, "ssm_state", ScalarType::Float);
  const int64_t heads = ssm_state.size(1), state_dim = ssm_state.size(2), head_dim = ssm_state.size(3);
  for (const auto& [name, size] : {std::pair{"state_dim", state_dim}, {"head_dim", head_dim}}) {
    check_state_dim(check, "ssm_state", name, size, kScanUnit, kLargestScanDim);
  }
  const int64_t inner = heads * head_dim, rest = xbc.size(1) - inner, groups = rest / (2 * state_dim);
  check.require(rest > 0 && rest % (2 * state_dim) == 0 && heads % groups == 0, "xbc must have ", heads, " * ",
                head_dim, " + 2 * groups * ", state_dim, " columns, where groups divides ", heads, ", got ",
                xbc.size(1));
  check.shape(z, "z", {tokens, inner});
  check.dtype(z, "z", xbc.scalar_type());
  check.rows_contiguous(z, "z");
  check.shape(dt, "dt", {tokens, heads});
  check.rows_contiguous(dt, "dt");
  check.require(dt_min >= 0 && dt_min <= dt_max, "dt_min must be from 0 to dt_max, ", dt_max, ", got ", dt_min);
  if (norm_weight) {
    check.shape(*norm_weight, "norm_weight", {inner});
    check.contiguous(*norm_weight, "norm_weight");
  }
  Mamba2ScanParams params{
      .xbc = xbc.data_ptr(),
      .z = z.data_ptr(),
      .dt = dt.data_ptr(),
      .a_log = head_floats(check, a_log, "a_log", heads),
      .dt_bias = head_floats(check, dt_bias, "dt_bias", heads),
      .d = head_floats(check, d, "d", heads),
      .norm_weight = norm_weight ? norm_weight->data_ptr() : nullptr,
      .state = static_cast<float*>(ssm_state.data_ptr()),
      .out = nullptr,
      .outputs = nullptr,
      .slots = state_slots(check, ssm_state, "ssm_state", query_start, state_reads, state_writes, tokens),
      .tokens = tokens,
      .xbc_stride = xbc.stride(0),
      .z_stride = z.stride(0),
      .dt_stride = dt.stride(0),
      .heads = heads,
      .groups = groups,
      .state_dim = state_dim,
      .head_dim = head_dim,
      .dt_min = static_cast<float>(dt_min),
      .dt_max = static_cast<float>(dt_max),
      .eps = static_cast<float>(eps),
      .dtype = dtype,
      .dt_dtype = check.fp32_or(dtype, dt, "dt"),
      .norm_weight_dtype = norm_weight ? check.fp32_or(dtype, *norm_weight, "norm_weight") : dtype,
  };
  if (const cuda::Device* const gpu = gpu_of(xbc)) {
    params.device = *gpu;
    const bool aligned = reinterpret_cast<uintptr_t>(params.state) % 16 == 0 && params.slots.stride % 4 == 0;
    check.require(aligned, "ssm_state must have slots that are aligned to 16 bytes on CUDA");
  }
  const Tensor out = output.tensor(check, xbc, {tokens, inner});
  params.out = out.data_ptr();
  Tensor outputs;
  if (norm_weight) {
    outputs = new_tensor(xbc, {tokens, inner}, ScalarType::Float);
    params.outputs = static_cast<float*>(outputs.data_ptr());
  }
  FASTINFER_LAUNCH(xbc, mamba2_scan, params);
  return out;
}

}  // namespace

FASTINFER_OPERATORS(m) {
  impl_with_out<&mamba2_scan>(m, "mamba2_scan");
}

}  // namespace fastinfer
