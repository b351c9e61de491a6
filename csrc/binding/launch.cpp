#include "binding/launch.h"

#include <torch/csrc/stable/ops.h>

#include <vector>

namespace fastinfer {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

Tensor new_tensor(const Tensor& like, torch::headeronly::IntHeaderOnlyArrayRef sizes, std::optional<ScalarType> dtype) {
  const cpu::LaunchGraph* const graph = cpu::recording();
  if (graph == nullptr || !like.is_cpu()) return torch::stable::new_empty(like, sizes, dtype);
  const ScalarType type = dtype.value_or(like.scalar_type());
  int64_t elements = 1;
  std::vector<int64_t> strides(sizes.size());
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = elements;
    elements *= std::max<int64_t>(sizes[i], 1);  // empty tensors have the same strides in torch
  }
  const auto shim_dtype = torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
  const auto allocation = graph->memory()->allocate(elements * aoti_torch_dtype_element_size(shim_dtype));
  return torch::stable::from_blob(allocation.data, sizes, strides, like.device(), type,
                                  [memory = graph->memory(), allocation](void*) { memory->free(allocation); });
}

}  // namespace fastinfer
