// The one place that launches a kernel, and turns a refused launch into an error that names the kernel and its shape.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "common/cuda/device.h"
#include "common/launch_config.h"
#include "common/text.h"

namespace fastinfer::cuda {

inline void check(const char* name, const LaunchConfig& config, cudaError_t error) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // or torch would find it after some later operator
  throw std::runtime_error(concatenate(name, ": the launch of ", config.grid, " x ", config.grid_y, " blocks of ",
                                       config.block, " threads with ", config.shared_bytes,
                                       " bytes of shared memory failed: ", cudaGetErrorString(error)));
}

template <class... KernelArgs, class... Args>
void launch(const char* name, void (*kernel)(KernelArgs...), const LaunchConfig& config, void* stream,
            const Args&... args) {
  if (config.grid == 0 || config.grid_y == 0) return;
  check_grid(name, config);
  const bool can_wait = prepare_kernel(name, reinterpret_cast<const void*>(kernel));
  cudaLaunchAttribute dependent{};
  dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  dependent.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(static_cast<unsigned>(config.grid), config.grid_y);
  launch.blockDim = config.block;
  launch.dynamicSmemBytes = config.shared_bytes;
  launch.stream = static_cast<cudaStream_t>(stream);
  launch.attrs = &dependent;
  launch.numAttrs = config.dependent && can_wait ? 1 : 0;
  check(name, config, cudaLaunchKernelEx(&launch, kernel, KernelArgs(args)...));
}

}  // namespace fastinfer::cuda
