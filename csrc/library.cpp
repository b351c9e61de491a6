// Every operator's schema in one place.
#include <torch/csrc/stable/library.h>

// The namespace comes from the build: tests/emulation registers the same operators under another one.
#define FASTINFER_SCHEMAS(name, m) STABLE_TORCH_LIBRARY(name, m)

FASTINFER_SCHEMAS(FASTINFER_NAMESPACE, m) {
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("add_rms_norm(Tensor x, Tensor(a!) residual, Tensor weight, float eps) -> Tensor");
  m.def("silu_and_mul(Tensor x) -> Tensor");
  m.def("gelu_and_mul(Tensor x, str approximate) -> Tensor");
  m.def("rotary_embedding(Tensor(a!) q, Tensor(b!) k, Tensor positions, Tensor cos_sin_cache, bool interleaved) -> ()");
  m.def("store_kv_cache(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping) -> ()");
  m.def(
      "paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor seq_lens, "
      "Tensor query_start, float scale, int window, float softcap, Tensor? sinks, Tensor(a!)? lse) -> Tensor");
  m.def(
      "gemm(Tensor x, Tensor weight, Tensor? bias, Tensor? norm_weight, float eps, str? activation, "
      "Tensor? residual) -> Tensor");
  m.def(
      "int8_gemm(Tensor x, Tensor qweight, Tensor scales, Tensor? mins, int out_features, Tensor? bias, "
      "Tensor? norm_weight, float eps, str? activation, Tensor? residual, int activation_bits) -> Tensor");
  m.def(
      "int4_gemm(Tensor x, Tensor qweight, Tensor scales, Tensor? mins, int out_features, Tensor? bias, "
      "Tensor? norm_weight, float eps, str? activation, Tensor? residual, int activation_bits) -> Tensor");
  m.def("int4_pack(Tensor q) -> Tensor");
  m.def("int8_pack(Tensor q) -> Tensor");
  m.def(
      "int4_dequantize(Tensor qweight, Tensor scales, Tensor? mins, int out_features, Tensor? rows, "
      "ScalarType dtype) -> Tensor");
  m.def(
      "int8_dequantize(Tensor qweight, Tensor scales, Tensor? mins, int out_features, Tensor? rows, "
      "ScalarType dtype) -> Tensor");
  m.def(
      "sample(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seeds, "
      "Tensor positions) -> (Tensor, Tensor)");
}
