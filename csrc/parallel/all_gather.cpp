#include "parallel/all_gather.h"

#include <vector>

#include "parallel/group_binding.h"

namespace fastinfer {
namespace {

void check_row(const Checks& check, const parallel::Group& group, int64_t row_bytes) {
  check.require(row_bytes > 0 && row_bytes <= group.slot_bytes, "a row must have between 1 and ", group.slot_bytes,
                " bytes, the size of the group's slots, got ", row_bytes);
}

Tensor all_gather(const Output& output, const Tensor& x, const Tensor& memory, int64_t rank,
                  const std::vector<int64_t>& widths) {
  const Checks check("all_gather", x);
  parallel::Group* const group = group_of(check, memory, rank);
  check.require(static_cast<int64_t>(widths.size()) == group->size, "widths must have ", group->size,
                " numbers, one for each rank, got ", widths.size());
  check.shape(x, "x", {kAny, widths[rank]});
  check.contiguous(x, "x");
  check.float_dtype(x, "x");
  AllGatherParams params{
      .group = group,
      .x = x.data_ptr(),
      .out = nullptr,
      .rows = x.size(0),
      .starts = {},
      .rank = static_cast<int>(rank),
  };
  int64_t columns = 0;
  for (int64_t i = 0; i < group->size; ++i) {
    check.require(widths[i] > 0, "widths[", i, "] must be positive, got ", widths[i]);
    columns += widths[i];
    params.starts[i + 1] = columns * static_cast<int64_t>(x.element_size());
  }
  check_row(check, *group, params.starts[group->size]);
  const Tensor out = output.tensor(check, x, {x.size(0), columns});
  params.out = out.data_ptr();
  cpu::launch(&cpu::all_gather, params);
  return out;
}

Tensor all_gather_rows(const Output& output, const Tensor& x, const Tensor& ids, const Tensor& memory, int64_t rank,
                       int64_t start, int64_t end) {
  const Checks check("all_gather_rows", x);
  parallel::Group* const group = group_of(check, memory, rank);
  check.shape(x, "x", {kAny, kAny});
  check.contiguous(x, "x");
  check.float_dtype(x, "x");
  check.shape(ids, "ids", {x.size(0)});
  check.dtype(ids, "ids", ScalarType::Long);
  check.contiguous(ids, "ids");
  const int64_t row_bytes = x.size(1) * static_cast<int64_t>(x.element_size());
  check_row(check, *group, row_bytes);
  const Tensor out = output.tensor(check, x, {x.size(0), x.size(1)});
  cpu::launch(&cpu::all_gather_rows, {
                                         .group = group,
                                         .x = x.data_ptr(),
                                         .ids = static_cast<const int64_t*>(ids.data_ptr()),
                                         .out = out.data_ptr(),
                                         .rows = x.size(0),
                                         .row_bytes = row_bytes,
                                         .start = start,
                                         .end = end,
                                         .rank = static_cast<int>(rank),
                                     });
  return out;
}

Tensor local_ids(const Output& output, const Tensor& ids, int64_t start, int64_t end) {
  const Checks check("local_ids", ids);
  check.shape(ids, "ids", {kAny});
  check.dtype(ids, "ids", ScalarType::Long);
  check.contiguous(ids, "ids");
  check.require(start < end, "start must be less than end, got ", start, " and ", end);
  const Tensor out = output.tensor(check, ids, {ids.size(0)});
  cpu::launch(&cpu::local_ids, {
                                   .ids = static_cast<const int64_t*>(ids.data_ptr()),
                                   .out = static_cast<int64_t*>(out.data_ptr()),
                                   .rows = ids.size(0),
                                   .start = start,
                                   .end = end,
                               });
  return out;
}

}  // namespace

FASTINFER_CPU_OPERATORS(m) {
  impl_with_out<&all_gather>(m, "all_gather");
  impl_with_out<&all_gather_rows>(m, "all_gather_rows");
  impl_with_out<&local_ids>(m, "local_ids");
}

}  // namespace fastinfer
