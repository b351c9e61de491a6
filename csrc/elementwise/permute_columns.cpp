#include "elementwise/permute_columns.h"

#include "binding/output.h"

namespace fastinfer {
namespace {

Tensor permute_columns(const Output& output, const Tensor& x, const Tensor& permutation) {
  const Checks check("permute_columns", x);
  check.shape(x, "x", {kAny, kAny});
  check.rows_contiguous(x, "x");
  const DType dtype = check.float_dtype(x, "x");
  const int64_t tokens = x.size(0), cols = x.size(1);
  check.shape(permutation, "permutation", {cols});
  check.dtype(permutation, "permutation", ScalarType::Long);
  check.contiguous(permutation, "permutation");
  const auto* from = static_cast<const int64_t*>(permutation.data_ptr());
  for (int64_t i = 0; gpu_of(permutation) == nullptr && i < cols; ++i) {
    check.require(from[i] >= 0 && from[i] < cols, "permutation[", i, "] must be in 0..", cols - 1, ", got ", from[i]);
  }
  const Tensor out = output.tensor(check, x, {tokens, cols});
  const PermuteColumnsParams params{
      .x = x.data_ptr(),
      .permutation = from,
      .out = out.data_ptr(),
      .x_stride = x.stride(0),
      .tokens = tokens,
      .cols = cols,
      .wide = dtype == DType::kFloat32,
  };
  FASTINFER_LAUNCH(x, permute_columns, params);
  return out;
}

}  // namespace

FASTINFER_OPERATORS(m) {
  impl_with_out<&permute_columns>(m, "permute_columns");
}

}  // namespace fastinfer
