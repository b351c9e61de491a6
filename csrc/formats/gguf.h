// What reading a GGUF file takes too long in Python for: its header's strings, and the bits of its blocks.
#pragma once

#include <pybind11/pybind11.h>

namespace fastinfer {

void define_gguf(pybind11::module_& m);

}  // namespace fastinfer
