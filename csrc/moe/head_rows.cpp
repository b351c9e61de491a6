#include "moe/head_rows.h"

#include <tuple>

#include "binding/checks.h"
#include "binding/launch.h"

namespace fastinfer {
namespace {

std::tuple<Tensor, Tensor> head_rows(const Tensor& positions, int64_t heads) {
  const Checks check("head_rows", positions);
  check.shape(positions, "positions", {kAny});
  check.dtype(positions, "positions", ScalarType::Long);
  const int64_t tokens = positions.size(0);
  check.require(heads >= 1 && heads <= kMostHeads, "heads must be 1 to ", kMostHeads, ", got ", heads);
  check.require(tokens * heads <= INT32_MAX, "positions must have fewer than 2^31 / heads elements, got ", tokens);
  Tensor row_ids = new_tensor(positions, {tokens * heads}, ScalarType::Int);
  Tensor head_start = new_tensor(positions, {heads + 1}, ScalarType::Int);
  const HeadRowsParams params{
      .row_ids = static_cast<int32_t*>(row_ids.data_ptr()),
      .head_start = static_cast<int32_t*>(head_start.data_ptr()),
      .tokens = tokens,
      .heads = static_cast<int>(heads),
  };
  FASTINFER_LAUNCH(positions, head_rows, params);
  return {row_ids, head_start};
}

}  // namespace

FASTINFER_OPERATORS(m) {
  m.impl("head_rows", TORCH_BOX(&head_rows));
}

}  // namespace fastinfer
