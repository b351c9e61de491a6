// Every operator's schema in one place, and the pybind11 module: what has no tensors in it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/stable/library.h>

#include <string>
#include <vector>

#include "common/cpu/isa.h"
#include "common/cpu/parallel.h"

STABLE_TORCH_LIBRARY(fastinfer, m) {
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

namespace fastinfer {
namespace {

namespace py = pybind11;

std::vector<std::string> names(const std::vector<cpu::Isa>& isas) {
  std::vector<std::string> result;
  for (const cpu::Isa isa : isas) result.emplace_back(cpu::name(isa));
  return result;
}

py::dict cpu_info() {
  const cpu::IsaChoice& choice = cpu::active_isa();
  py::dict info;
  info["features"] = cpu::cpu_features();
  info["isa"] = cpu::name(choice.isa);
  info["isa_reason"] = choice.reason;
  info["isas_built"] = names(cpu::built_isas());
  info["isas_usable"] = names(cpu::usable_isas());
  info["num_threads"] = cpu::num_threads();
  return info;
}

py::dict build_info() {
  py::dict info;
  info["version"] = FASTINFER_VERSION;
  info["compiler"] = FASTINFER_COMPILER;
  info["torch_target"] = FASTINFER_TORCH_TARGET;
#if defined(FASTINFER_CUDA)
  info["cuda_version"] = FASTINFER_CUDA_VERSION;
  info["cuda_archs"] = py::str(FASTINFER_CUDA_ARCHS).attr("split")(",");
#else
  info["cuda_version"] = py::none();
  info["cuda_archs"] = py::list();
#endif
  return info;
}

}  // namespace
}  // namespace fastinfer

PYBIND11_MODULE(_C, m) {
  m.doc() = "Build facts, CPU features and threads; importing it registers torch.ops.fastinfer.*";
  fastinfer::cpu::active_isa();  // an impossible FASTINFER_CPU_ISA is an error at import, not at the first call
  m.def("build_info", &fastinfer::build_info, "What this library was built with.");
  m.def("cpu_info", &fastinfer::cpu_info, "CPU features, and the instruction set in use with the reason.");
  m.def("get_num_threads", &fastinfer::cpu::num_threads, "Threads that the CPU kernels use.");
  m.def("set_num_threads", &fastinfer::cpu::set_num_threads, pybind11::arg("count"),
        "Set the threads that the CPU kernels use; ValueError unless 1 <= count <= 1024.");
}
