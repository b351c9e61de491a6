// The one place that launches a kernel, and turns a refused launch into an error that names the kernel and its shape.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>

namespace fastinfer::cuda {

struct LaunchConfig {
  int64_t grid;
  unsigned block;
  size_t shared_bytes = 0;
};

template <class... KernelArgs, class... Args>
void launch(const char* name, void (*kernel)(KernelArgs...), const LaunchConfig& config, void* stream,
            const Args&... args) {
  if (config.grid == 0) return;
  if (config.grid > INT32_MAX) throw std::runtime_error(std::string(name) + ": more than 2^31 - 1 blocks are needed");
  cudaLaunchConfig_t launch{};
  launch.gridDim = static_cast<unsigned>(config.grid);
  launch.blockDim = config.block;
  launch.dynamicSmemBytes = config.shared_bytes;
  launch.stream = static_cast<cudaStream_t>(stream);
  const cudaError_t error = cudaLaunchKernelEx(&launch, kernel, KernelArgs(args)...);
  if (error == cudaSuccess) return;
  std::ostringstream message;
  message << name << ": the launch of " << config.grid << " blocks of " << config.block << " threads with "
          << config.shared_bytes << " bytes of shared memory failed: " << cudaGetErrorString(error);
  throw std::runtime_error(message.str());
}

}  // namespace fastinfer::cuda
