// Every operator's schema in one place.
#include <torch/csrc/stable/library.h>

#include <string>

// The namespace comes from the build: tests/emulation registers the same operators under another one.
#define FASTINFER_SCHEMAS(name, m) STABLE_TORCH_LIBRARY(name, m)

namespace {

// A result as a new tensor, and `.out`, which writes it into the caller's. That one returns nothing: a schema whose
// result is one of its arguments cannot be traced.
void def_with_out(torch::stable::detail::StableLibrary& m, const std::string& name, const std::string& arguments) {
  m.def((name + "(" + arguments + ") -> Tensor").c_str());
  m.def((name + ".out(" + arguments + ", *, Tensor(out!) out) -> ()").c_str());
}

}  // namespace

FASTINFER_SCHEMAS(FASTINFER_NAMESPACE, m) {
  def_with_out(m, "rms_norm", "Tensor x, Tensor weight, float eps, Tensor? residual=None, float factor=1.0");
  def_with_out(m, "add_rms_norm", "Tensor x, Tensor(a!) residual, Tensor weight, float eps");
  m.def("rms_norm_quantize(Tensor x, Tensor(a!)? residual, Tensor weight, float eps) -> (Tensor, Tensor)");
  def_with_out(m, "layer_norm", "Tensor x, Tensor weight, Tensor bias, float eps");
  m.def("quantize_int8(Tensor x) -> (Tensor, Tensor)");
  def_with_out(m, "embedding", "Tensor weight, Tensor ids, Tensor? residual=None, ScalarType? dtype=None");
  def_with_out(m, "silu_and_mul", "Tensor x, float? limit=None");
  def_with_out(m, "gelu_and_mul", "Tensor x, str approximate");
  def_with_out(m, "gelu", "Tensor x, str approximate, Tensor? factor=None");
  def_with_out(m, "relu2", "Tensor x");
  def_with_out(m, "xielu", "Tensor x, float positive, float negative, float beta, float eps");
  def_with_out(m, "clamped_swiglu", "Tensor x");
  def_with_out(m, "sigmoid_gate", "Tensor x, Tensor gate");
  def_with_out(m, "softplus_gate", "Tensor x, Tensor gate");
  m.def("softcap(Tensor(a!) x, float cap) -> ()");
  m.def("rotary_embedding(Tensor(a!) q, Tensor(b!) k, Tensor positions, Tensor cos_sin_cache, bool interleaved) -> ()");
  m.def(
      "norm_rotary_store(Tensor(a!) q, Tensor k, Tensor v, Tensor? q_norm_weight, Tensor? k_norm_weight, float eps, "
      "Tensor positions, Tensor cos_sin_cache, bool interleaved, Tensor(b!) k_cache, Tensor(c!) v_cache, "
      "Tensor(d!)? k_scale, Tensor(e!)? v_scale, Tensor slot_mapping, bool norm_v=False, "
      "Tensor? query_scales=None) -> ()");
  m.def(
      "latent_rotary_store(Tensor q_latent, Tensor q_rope, Tensor kv, Tensor norm_weight, float eps, Tensor positions, "
      "Tensor cos_sin_cache, bool interleaved, Tensor? query_scales, Tensor(a!) cache, Tensor(b!)? scale, "
      "Tensor slot_mapping) -> Tensor");
  m.def(
      "store_kv_cache(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, "
      "Tensor(c!)? k_scale=None, Tensor(d!)? v_scale=None) -> ()");
  def_with_out(m, "paged_attention",
               "Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor seq_lens, Tensor query_start, "
               "float scale, int window, float softcap, Tensor? sinks, Tensor(a!)? lse, Tensor? k_scale=None, "
               "Tensor? v_scale=None, Tensor? plan=None, bool chunked=False");
  m.def(
      "paged_attention_plan(Tensor seq_lens, Tensor query_start, int q_heads, int kv_heads, int head_dim, int window, "
      "bool chunked=False) -> Tensor");
  m.def("store_key_codes(Tensor(a!) codes, Tensor k_cache, Tensor? k_scale, Tensor slot_mapping) -> ()");
  m.def("store_value_codes(Tensor(a!) codes, Tensor v_cache, Tensor? v_scale, Tensor slot_mapping) -> ()");
  m.def(
      "select_pages(Tensor q, Tensor codes, Tensor block_table, Tensor seq_lens, Tensor query_start, int block_size, "
      "float share, int num_dense_pages, float scale, Tensor? row_start=None) -> (Tensor, Tensor)");
  m.def(
      "select_pages.rest(Tensor q, Tensor codes, Tensor block_table, Tensor seq_lens, Tensor query_start, "
      "int block_size, float share, int num_dense_pages, float scale, Tensor value_codes, Tensor(a!) rest, "
      "Tensor(b!) rest_lse) -> (Tensor, Tensor)");
  m.def(
      "select_tokens(Tensor q, Tensor weights, Tensor keys, Tensor block_table, Tensor seq_lens, Tensor query_start, "
      "int top_k) -> (Tensor, Tensor)");
  def_with_out(m, "causal_conv1d",
               "Tensor x, Tensor weight, Tensor? bias, Tensor(a!) conv_state, Tensor query_start, Tensor state_reads, "
               "Tensor state_writes, Tensor? gates=None");
  def_with_out(m, "gated_delta_rule",
               "Tensor qkv, Tensor z, Tensor a, Tensor b, Tensor a_log, Tensor dt_bias, Tensor norm_weight, float eps, "
               "Tensor(a!) recurrent_state, Tensor query_start, Tensor state_reads, Tensor state_writes, "
               "float beta_scale=1.0, bool sigmoid_gate=False, float decay_bound=0.0");
  def_with_out(m, "mamba2_scan",
               "Tensor xbc, Tensor z, Tensor dt, Tensor a_log, Tensor dt_bias, Tensor d, Tensor? norm_weight, "
               "float eps, float dt_min, float dt_max, Tensor(a!) ssm_state, Tensor query_start, Tensor state_reads, "
               "Tensor state_writes");
  m.def("set_batch_invariant(bool value) -> bool");
  m.def("set_constant_weights(bool value) -> bool");
  m.def("set_dependent_launches(bool value) -> bool");
  m.def("set_first_prompt_row(int value) -> int");
  m.def("merge_attention_states(Tensor a, Tensor a_lse, Tensor b, Tensor b_lse) -> (Tensor, Tensor)");
  m.def("merge_attention_states.inplace(Tensor(a!) a, Tensor(b!) a_lse, Tensor b, Tensor b_lse) -> ()");
  def_with_out(
      m, "gemm",
      "Tensor x, Tensor weight, Tensor? bias, Tensor? norm_weight, float eps, str? activation, Tensor? residual");
  for (const char* name : {"int8_gemm", "int5_gemm", "int4_gemm"}) {
    def_with_out(m, name,
                 "Tensor x, Tensor qweight, Tensor scales, Tensor? mins, int out_features, Tensor? bias, "
                 "Tensor? norm_weight, float eps, str? activation, Tensor? residual, int activation_bits");
  }
  def_with_out(m, "int6_gemm",
               "Tensor x, Tensor qweight, Tensor scales, int out_features, Tensor? bias, Tensor? norm_weight, "
               "float eps, str? activation, Tensor? residual, int activation_bits");
  def_with_out(m, "lut_gemm",
               "Tensor x, Tensor qweight, Tensor scales, Tensor table, int out_features, Tensor? bias, "
               "Tensor? norm_weight, float eps, str? activation, Tensor? residual, int activation_bits");
  def_with_out(m, "w8a8_gemm",
               "Tensor x, Tensor x_scales, Tensor qweight, Tensor scales, int out_features, Tensor? bias, "
               "str? activation, Tensor? residual, ScalarType dtype");
  m.def(
      "route_experts(Tensor logits, int top_k, bool renormalize, *, str scoring=\"softmax\", Tensor? bias=None, "
      "int num_groups=1, int top_groups=1, float scale=1.0, Tensor? expert_scale=None, float jitter=0.01, "
      "bool biased_logits=False) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def("head_rows(Tensor positions, int heads) -> (Tensor, Tensor)");
  def_with_out(m, "grouped_gemm",
               "Tensor x, Tensor weight, Tensor row_ids, Tensor expert_start, Tensor? bias, str? activation");
  for (const char* name : {"grouped_int8_gemm", "grouped_int5_gemm", "grouped_int4_gemm"}) {
    def_with_out(m, name,
                 "Tensor x, Tensor qweight, Tensor scales, Tensor? mins, int out_features, Tensor row_ids, "
                 "Tensor expert_start, Tensor? bias, str? activation, int activation_bits");
  }
  def_with_out(m, "grouped_int6_gemm",
               "Tensor x, Tensor qweight, Tensor scales, int out_features, Tensor row_ids, Tensor expert_start, "
               "Tensor? bias, str? activation, int activation_bits");
  def_with_out(m, "grouped_lut_gemm",
               "Tensor x, Tensor qweight, Tensor scales, Tensor table, int out_features, Tensor row_ids, "
               "Tensor expert_start, Tensor? bias, str? activation, int activation_bits");
  def_with_out(m, "combine_experts",
               "Tensor x, Tensor expert_weights, Tensor? residual, Tensor? expert_ids=None, int start=0, int end=0");
  m.def(
      "add_lora(Tensor(a!) y, Tensor x, Tensor a, Tensor b, Tensor adapter_ids, Tensor? expert_ids, "
      "Tensor? ranks, Tensor? norm_weight, float eps) -> ()");
  def_with_out(m, "permute_columns", "Tensor x, Tensor permutation");
  def_with_out(m, "all_gather", "Tensor x, Tensor(a!) group, int rank, int[] widths");
  def_with_out(m, "all_gather_rows", "Tensor x, Tensor ids, Tensor(a!) group, int rank, int start, int end");
  def_with_out(m, "all_reduce", "Tensor x, Tensor(a!) group, int rank");
  def_with_out(m, "all_reduce_add_rms_norm",
               "Tensor x, Tensor(b!) residual, Tensor weight, float eps, Tensor(a!) group, int rank");
  def_with_out(m, "local_ids", "Tensor ids, int start, int end");
  def_with_out(m, "int4_pack", "Tensor q");
  def_with_out(m, "int5_pack", "Tensor q");
  def_with_out(m, "int6_pack", "Tensor q");
  def_with_out(m, "int8_pack", "Tensor q");
  for (const char* name : {"int4_dequantize", "int5_dequantize", "int8_dequantize"}) {
    def_with_out(m, name,
                 "Tensor qweight, Tensor scales, Tensor? mins, int out_features, Tensor? rows, ScalarType dtype");
  }
  def_with_out(m, "int6_dequantize", "Tensor qweight, Tensor scales, int out_features, Tensor? rows, ScalarType dtype");
  m.def(
      "sample(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seeds, "
      "Tensor positions, Tensor? penalties, Tensor? output_counts, Tensor? prompt_mask, Tensor? mask, "
      "Tensor? bias_start, Tensor? bias_tokens, Tensor? bias_values, int? num_logprobs) -> (Tensor, Tensor, Tensor, "
      "Tensor)");
}
