#include "linear_attention/gated_delta_rule.h"

#include "binding/output.h"
#include "linear_attention/state_slots_binding.h"

namespace fastinfer {
namespace {

Tensor gated_delta_rule(const Output& output, const Tensor& qkv, const Tensor& z, const Tensor& a, const Tensor& b,
                        const Tensor& a_log, const Tensor& dt_bias, const Tensor& norm_weight, double eps,
                        const Tensor& recurrent_state, const Tensor& query_start, const Tensor& state_reads,
                        const Tensor& state_writes, double beta_scale, bool sigmoid_gate, double decay_bound) {
  const Checks check("gated_delta_rule", qkv);
  check.shape(qkv, "qkv", {kAny, kAny});
  check.rows_contiguous(qkv, "qkv");
  const DType dtype = check.float_dtype(qkv, "qkv");
  const int64_t tokens = qkv.size(0);
  check.shape(recurrent_state, "recurrent_state", {kAny, kAny, kAny, kAny});
  check.dtype(recurrent_state, "recurrent_state", ScalarType::Float);
  const int64_t heads = recurrent_state.size(1), key_dim = recurrent_state.size(2), value_dim = recurrent_state.size(3);
  for (const auto& [name, size] : {std::pair{"key_dim", key_dim}, {"value_dim", value_dim}}) {
    check_state_dim(check, "recurrent_state", name, size, kDeltaHeadUnit, kLargestDeltaHead);
  }
  const int64_t values = heads * value_dim, keys = qkv.size(1) - values, key_heads = keys / (2 * key_dim);
  check.require(keys > 0 && keys % (2 * key_dim) == 0 && heads % key_heads == 0, "qkv must have 2 * key_heads * ",
                key_dim, " + ", heads, " * ", value_dim, " columns, where key_heads divides ", heads, ", got ",
                qkv.size(1));
  check.shape(z, "z", {tokens, values});
  check.dtype(z, "z", qkv.scalar_type());
  check.rows_contiguous(z, "z");
  check.shape(a, "a", {tokens, kAny});
  const bool channels = a.size(1) == heads * key_dim;
  check.require(a.size(1) == heads || channels, "a must have ", heads, " or ", heads * key_dim, " columns, got ",
                a.size(1));
  check.rows_contiguous(a, "a");
  check.shape(b, "b", {tokens, heads});
  check.rows_contiguous(b, "b");
  check.require(decay_bound <= 0, "decay_bound must not be positive, got ", decay_bound);
  check.shape(norm_weight, "norm_weight", {value_dim});
  check.contiguous(norm_weight, "norm_weight");
  GatedDeltaRuleParams params{
      .qkv = qkv.data_ptr(),
      .z = z.data_ptr(),
      .a = a.data_ptr(),
      .b = b.data_ptr(),
      .a_log = head_floats(check, a_log, "a_log", heads),
      .dt_bias = head_floats(check, dt_bias, "dt_bias", a.size(1)),
      .norm_weight = norm_weight.data_ptr(),
      .state = static_cast<float*>(recurrent_state.data_ptr()),
      .out = nullptr,
      .slots = state_slots(check, recurrent_state, "recurrent_state", query_start, state_reads, state_writes, tokens),
      .tokens = tokens,
      .qkv_stride = qkv.stride(0),
      .z_stride = z.stride(0),
      .a_stride = a.stride(0),
      .b_stride = b.stride(0),
      .key_heads = key_heads,
      .value_heads = heads,
      .key_dim = key_dim,
      .value_dim = value_dim,
      .eps = static_cast<float>(eps),
      .beta_scale = static_cast<float>(beta_scale),
      .decay_bound = static_cast<float>(decay_bound),
      .channel_decay = channels,
      .sigmoid_gate = sigmoid_gate,
      .dtype = dtype,
      .a_dtype = check.fp32_or(dtype, a, "a"),
      .b_dtype = check.fp32_or(dtype, b, "b"),
      .norm_weight_dtype = check.fp32_or(dtype, norm_weight, "norm_weight"),
  };
  const Tensor out = output.tensor(check, qkv, {tokens, values});
  params.out = out.data_ptr();
  Tensor outputs;
  if (const cuda::Device* const gpu = gpu_of(qkv)) {
    params.device = *gpu;
    const bool aligned = reinterpret_cast<uintptr_t>(params.state) % 16 == 0 && params.slots.stride % 4 == 0;
    check.require(aligned, "recurrent_state must have slots that are aligned to 16 bytes on CUDA");
    outputs = new_tensor(qkv, {tokens, values}, ScalarType::Float);
    params.outputs = static_cast<float*>(outputs.data_ptr());
  }
  FASTINFER_LAUNCH(qkv, gated_delta_rule, params);
  return out;
}

}  // namespace

FASTINFER_OPERATORS(m) {
  impl_with_out<&gated_delta_rule>(m, "gated_delta_rule");
}

}  // namespace fastinfer
