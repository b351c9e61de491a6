#include "parallel/all_reduce.h"

#include "parallel/group_binding.h"

namespace fastinfer {
namespace {

Tensor all_reduce(const Output& output, const Tensor& x, const Tensor& memory, int64_t rank) {
  const Checks check("all_reduce", x);
  const GroupArgument group("all_reduce", x, memory, rank);
  const DType dtype = check.float_dtype(x, "x");
  check.contiguous(x, "x");
  const Tensor out = output.tensor(check, x, x.sizes(), std::nullopt, {&x});
  const AllReduceParams params{
      .group = group.cpus,
      .peers = group.gpus,
      .x = x.data_ptr(),
      .out = out.data_ptr(),
      .elements = x.numel(),
      .dtype = dtype,
      .rank = static_cast<int>(rank),
  };
  FASTINFER_LAUNCH(x, all_reduce, params);
  return out;
}

}  // namespace

FASTINFER_OPERATORS(m) {
  impl_with_out<&all_reduce>(m, "all_reduce");
}

}  // namespace fastinfer
