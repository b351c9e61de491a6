// csrc/binding/launch.h on the emulator: tensors lie in host memory, are treated as a GPU's, and the operators are
// those of torch.ops.fastinfer_emulated (fastinfer_traffic in the build that counts accesses).
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "common/cuda/arrival_counters.h"
#include "common/cuda/device.h"

#define FASTINFER_CPU_OPERATORS(m) [[maybe_unused]] static void not_emulated(torch::stable::detail::StableLibrary& m)
#define FASTINFER_OPERATORS(m) STABLE_TORCH_LIBRARY_IMPL(FASTINFER_NAMESPACE, CPU, m)
#define FASTINFER_LAUNCH(x, op, ...) ::fastinfer::cuda::op(__VA_ARGS__, nullptr)

namespace fastinfer {

inline torch::stable::Tensor new_tensor(const torch::stable::Tensor& like,
                                        torch::headeronly::IntHeaderOnlyArrayRef sizes,
                                        std::optional<torch::headeronly::ScalarType> dtype = std::nullopt) {
  return torch::stable::new_empty(like, sizes, dtype);
}

inline const cuda::Device* gpu_of(const torch::stable::Tensor& /*x*/) {
  return &cuda::device(0);
}

inline uint32_t* arrival_counters(const torch::stable::Tensor& /*like*/, int64_t count) {
  return cuda::arrival_counters(nullptr, count);
}

}  // namespace fastinfer
