// The pybind11 module fastinfer._C: what has no tensors in it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "common/cpu/isa.h"
#include "common/cpu/parallel.h"

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
