// Sends a launch to the CPU's kernel, or to the CUDA launcher on the tensor's device and its current stream.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>

#include <stdexcept>
#include <type_traits>

#if defined(FASTINFER_CUDA)
// Lives in libtorch_cuda, which a CPU build of torch does not have: weak, so that one binary loads under both.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void** stream);
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
    void* stream = nullptr;
    if (aoti_torch_get_current_cuda_stream == nullptr) {
      throw std::runtime_error("fastinfer: a CUDA tensor came, but this torch has no CUDA");
    }
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
    return cuda_launcher(params, stream);
  }
#endif
  cpu_kernel(params);
}

}  // namespace fastinfer
