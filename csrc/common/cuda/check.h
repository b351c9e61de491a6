// Turns an error of the CUDA runtime into an exception.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace fastinfer::cuda {

// `what` begins the message: the name of a kernel, or what was being done.
inline void check(const char* what, cudaError_t error) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // or torch would find it after some later operator
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

}  // namespace fastinfer::cuda
