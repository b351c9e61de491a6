// The one place that launches a kernel, and turns a refused launch into an error that names the kernel and its shape.
#pragma once

#include <cuda_runtime.h>

#include <sstream>
#include <stdexcept>

namespace fastinfer::cuda {

struct LaunchConfig {
  unsigned grid;
  unsigned block;
  size_t shared_bytes = 0;
};

template <class... KernelArgs, class... Args>
void launch(const char* name, void (*kernel)(KernelArgs...), const LaunchConfig& config, void* stream,
            const Args&... args) {
  if (config.grid == 0) return;
  cudaLaunchConfig_t launch{};
  launch.gridDim = config.grid;
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
