// Registers operators for every device of this build, and launches a kernel from a binding.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "common/cpu/launch_graph.h"
#include "common/launch_config.h"

// FASTINFER_OPERATORS(m) { m.impl(...); }   operators with a kernel for the CPU and for CUDA
// FASTINFER_CPU_OPERATORS(m) { ... }         operators without a CUDA kernel
// FASTINFER_LAUNCH(x, op, params)            cpu::op(params), or cuda::op(params, stream) where tensor x is on a GPU
// new_tensor(like, sizes, dtype)             memory for results and scratch
#define FASTINFER_CPU_OPERATORS(m) STABLE_TORCH_LIBRARY_IMPL(FASTINFER_NAMESPACE, CPU, m)

#if defined(FASTINFER_CUDA)

#include "binding/stream.h"
#include "common/cuda/arrival_counters.h"
#include "common/cuda/device.h"

#define FASTINFER_OPERATORS(m) FASTINFER_OPERATORS_BY(C10_ANONYMOUS_VARIABLE(register_operators_), m)
#define FASTINFER_OPERATORS_BY(function, m)                       \
  static void function(torch::stable::detail::StableLibrary& m);  \
  STABLE_TORCH_LIBRARY_IMPL(FASTINFER_NAMESPACE, CPU, library) {  \
    function(library);                                            \
  }                                                               \
  STABLE_TORCH_LIBRARY_IMPL(FASTINFER_NAMESPACE, CUDA, library) { \
    function(library);                                            \
  }                                                               \
  static void function(torch::stable::detail::StableLibrary& m)

#define FASTINFER_LAUNCH(x, op, ...)                                                \
  do {                                                                              \
    if ((x).is_cuda()) {                                                            \
      const auto index = (x).get_device_index();                                    \
      const torch::stable::accelerator::DeviceGuard guard(index);                   \
      ::fastinfer::cuda::op(__VA_ARGS__, ::fastinfer::cuda::current_stream(index)); \
    } else {                                                                        \
      ::fastinfer::cpu::launch(&::fastinfer::cpu::op, __VA_ARGS__);                 \
    }                                                                               \
  } while (false)

#else

#define FASTINFER_OPERATORS(m) FASTINFER_CPU_OPERATORS(m)
#define FASTINFER_LAUNCH(x, op, ...) ::fastinfer::cpu::launch(&::fastinfer::cpu::op, __VA_ARGS__)

#endif

namespace fastinfer {

// Allocates like torch's new_empty, or in the graph's memory while a graph is recorded. Every binding allocates with
// it.
torch::stable::Tensor new_tensor(const torch::stable::Tensor& like, torch::headeronly::IntHeaderOnlyArrayRef sizes,
                                 std::optional<torch::headeronly::ScalarType> dtype = std::nullopt);

// The GPU that a tensor is on, for launch policies. Null for a tensor in host memory, whose contents a check may read.
inline const cuda::Device* gpu_of([[maybe_unused]] const torch::stable::Tensor& x) {
#if defined(FASTINFER_CUDA)
  if (x.is_cuda()) return &cuda::device(x.get_device_index());
#endif
  return nullptr;
}

// Counters for one kernel on the current stream of the GPU that `like` is on (common/cuda/arrival_counters.h).
inline uint32_t* arrival_counters([[maybe_unused]] const torch::stable::Tensor& like, [[maybe_unused]] int64_t count) {
#if defined(FASTINFER_CUDA)
  const auto index = like.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(index);
  return cuda::arrival_counters(cuda::current_stream(index), count);
#else
  return nullptr;
#endif
}

}  // namespace fastinfer
