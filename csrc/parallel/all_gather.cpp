#include "parallel/all_gather.h"

#include <vector>

#include "parallel/group_binding.h"

namespace fastinfer {
namespace {

Tensor all_gather(const Output& output, const Tensor& x, const Tensor& memory, int64_t rank,
                  const std::vector<int64_t>& widths) {
  const Checks check("all_gather", x);
  const GroupArgument group("all_gather", x, memory, rank);
  check.require(static_cast<int64_t>(widths.size()) == group.size, "widths must have ", group.size,
                " numbers, one for each rank, got ", widths.size());
  check.shape(x, "x", {kAny, widths[rank]});
  check.contiguous(x, "x");
  check.float_dtype(x, "x");
  AllGatherParams params{
      .group = group.cpus,
      .peers = group.gpus,
      .x = x.data_ptr(),
      .out = nullptr,
      .rows = x.size(0),
      .starts = {},
      .rank = static_cast<int>(rank),
  };
  int64_t columns = 0;
  for (int64_t i = 0; i < group.size; ++i) {
    check.require(widths[i] > 0, "widths[", i, "] must be positive, got ", widths[i]);
    columns += widths[i];
    params.starts[i + 1] = columns * static_cast<int64_t>(x.element_size());
  }
  group.check_row(check, params.starts[group.size]);
  const Tensor out = output.tensor(check, x, {x.size(0), columns});
  params.out = out.data_ptr();
  FASTINFER_LAUNCH(x, all_gather, params);
  return out;
}

}  // namespace

FASTINFER_OPERATORS(m) {
  impl_with_out<&all_gather>(m, "all_gather");
}

}  // namespace fastinfer
