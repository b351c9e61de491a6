// A Python extension of one's own: RMSNorm of NumPy arrays. In a process that also imports fastinfer.ops, both use one
// pool of threads.
#include <fastinfer/common/cpu/parallel.h>
#include <fastinfer/norm/rms_norm.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <stdexcept>

namespace py = pybind11;
using Array = py::array_t<float, py::array::c_style>;

Array rms_norm(const Array& x, const Array& weight, float eps) {
  if (x.ndim() != 2 || weight.ndim() != 1 || weight.shape(0) != x.shape(1)) {
    throw std::invalid_argument("x must be [rows, hidden] and weight [hidden]");
  }
  Array out({x.shape(0), x.shape(1)});
  const fastinfer::RmsNormParams params{
      .x = x.data(),
      .residual = nullptr,
      .addend = nullptr,
      .weight = weight.data(),
      .out = out.mutable_data(),
      .scales = nullptr,
      .rows = x.shape(0),
      .hidden = x.shape(1),
      .eps = eps,
      .dtype = fastinfer::DType::kFloat32,
      .weight_dtype = fastinfer::DType::kFloat32,
  };
  const py::gil_scoped_release release;
  fastinfer::cpu::rms_norm(params);
  return out;
}

PYBIND11_MODULE(numpy_norm, m) {
  m.def("rms_norm", &rms_norm, py::arg("x").noconvert(), py::arg("weight").noconvert(), py::arg("eps") = 1e-6f);
  m.def("num_threads", &fastinfer::cpu::num_threads);
}
