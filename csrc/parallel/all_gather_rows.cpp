#include "parallel/all_gather.h"
#include "parallel/group_binding.h"

namespace fastinfer {
namespace {

Tensor all_gather_rows(const Output& output, const Tensor& x, const Tensor& ids, const Tensor& memory, int64_t rank,
                       int64_t start, int64_t end) {
  const Checks check("all_gather_rows", x);
  const GroupArgument group("all_gather_rows", x, memory, rank);
  check.shape(x, "x", {kAny, kAny});
  check.contiguous(x, "x");
  check.float_dtype(x, "x");
  check.shape(ids, "ids", {x.size(0)});
  check.dtype(ids, "ids", ScalarType::Long);
  check.contiguous(ids, "ids");
  const int64_t row_bytes = x.size(1) * static_cast<int64_t>(x.element_size());
  group.check_row(check, row_bytes);
  const Tensor out = output.tensor(check, x, {x.size(0), x.size(1)});
  const AllGatherRowsParams params{
      .group = group.cpus,
      .peers = group.gpus,
      .x = x.data_ptr(),
      .ids = static_cast<const int64_t*>(ids.data_ptr()),
      .out = out.data_ptr(),
      .rows = x.size(0),
      .row_bytes = row_bytes,
      .start = start,
      .end = end,
      .rank = static_cast<int>(rank),
  };
  FASTINFER_LAUNCH(x, all_gather_rows, params);
  return out;
}

Tensor local_ids(const Output& output, const Tensor& ids, int64_t start, int64_t end) {
  const Checks check("local_ids", ids);
  check.shape(ids, "ids", {kAny});
  check.dtype(ids, "ids", ScalarType::Long);
  check.contiguous(ids, "ids");
  check.require(start < end, "start must be less than end, got ", start, " and ", end);
  const Tensor out = output.tensor(check, ids, {ids.size(0)});
  const LocalIdsParams params{
      .ids = static_cast<const int64_t*>(ids.data_ptr()),
      .out = static_cast<int64_t*>(out.data_ptr()),
      .rows = ids.size(0),
      .start = start,
      .end = end,
  };
  FASTINFER_LAUNCH(ids, local_ids, params);
  return out;
}

}  // namespace

FASTINFER_OPERATORS(m) {
  impl_with_out<&all_gather_rows>(m, "all_gather_rows");
  impl_with_out<&local_ids>(m, "local_ids");
}

}  // namespace fastinfer
