#include "linear_attention/causal_conv1d.h"

#include "binding/output.h"
#include "linear_attention/state_slots_binding.h"

namespace fastinfer {
namespace {

Tensor causal_conv1d(const Output& output, const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                     const Tensor& conv_state, const Tensor& query_start, const Tensor& state_reads,
                     const Tensor& state_writes, const std::optional<Tensor>& gates) {
  const Checks check("causal_conv1d", x);
  check.shape(x, "x", {kAny, kAny});
  check.rows_contiguous(x, "x");
  const DType dtype = check.float_dtype(x, "x");
  const int64_t tokens = x.size(0), dim = x.size(1);
  check.shape(weight, "weight", {dim, kAny});
  check.contiguous(weight, "weight");
  const int64_t kernel = weight.size(1);
  check.require((kernel >= 2 && kernel <= 4) || kernel == 7, "weight must have 2 to 4 columns, or 7, got ", kernel);
  const DType weight_dtype = check.fp32_or(dtype, weight, "weight");
  if (bias) {
    check.shape(*bias, "bias", {dim});
    check.contiguous(*bias, "bias");
    check.dtype(*bias, "bias", weight.scalar_type());
  }
  if (gates) {
    check.shape(*gates, "gates", {tokens, 2 * dim});
    check.rows_contiguous(*gates, "gates");
    check.dtype(*gates, "gates", x.scalar_type());
  }
  check.shape(conv_state, "conv_state", {kAny, kernel - 1, dim});
  check.dtype(conv_state, "conv_state", x.scalar_type());
  const StateSlots slots = state_slots(check, conv_state, "conv_state", query_start, state_reads, state_writes, tokens);
  const Tensor out = output.tensor(check, x, {tokens, dim});
  const CausalConv1dParams params{
      .x = x.data_ptr(),
      .weight = weight.data_ptr(),
      .bias = bias ? bias->data_ptr() : nullptr,
      .gates = gates ? gates->data_ptr() : nullptr,
      .state = conv_state.data_ptr(),
      .out = out.data_ptr(),
      .slots = slots,
      .tokens = tokens,
      .dim = dim,
      .kernel = kernel,
      .x_stride = x.stride(0),
      .gates_stride = gates ? gates->stride(0) : 0,
      .dtype = dtype,
      .weight_dtype = weight_dtype,
  };
  FASTINFER_LAUNCH(x, causal_conv1d, params);
  return out;
}

}  // namespace

FASTINFER_OPERATORS(m) {
  impl_with_out<&causal_conv1d>(m, "causal_conv1d");
}

}  // namespace fastinfer
