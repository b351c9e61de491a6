// The parts of reading a GGUF file that are too slow in Python: its header's strings, and its blocks.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

namespace fastinfer {

void define_gguf(pybind11::module_& m);

}  // namespace fastinfer
