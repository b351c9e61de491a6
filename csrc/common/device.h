// Sends a launch to the CPU's kernel, or to the CUDA launcher on the tensor's device and its current stream.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>

#include <type_traits>

#if defined(FASTINFER_CUDA)
#include "common/cuda/stream.h"
#define FASTINFER_CUDA_LAUNCHER(fn) fn
#else
#define FASTINFER_CUDA_LAUNCHER(fn) nullptr
#endif

namespace fastinfer {

template <class Params>
void launch([[maybe_unused]] const torch::stable::Tensor& on, const Params& params,
            std::type_identity_t<void (*)(const Params&)> cpu_kernel,
            [[maybe_unused]] std::type_identity_t<void (*)(const Params&, void* stream)> cuda_launcher) {
#if defined(FASTINFER_CUDA)
  if (on.is_cuda()) {
    const auto device = on.get_device_index();
    const torch::stable::accelerator::DeviceGuard guard(device);
    return cuda_launcher(params, cuda::current_stream(device));
  }
#endif
  cpu_kernel(params);
}

}  // namespace fastinfer
