#include "lora/add_lora.h"

#include "binding/checks.h"
#include "binding/launch.h"

namespace fastinfer {
namespace {

struct Rows {
  int64_t out, run, run_stride;
};

// y is [tokens, out], or [tokens, runs, run]: gate or up of a product whose rows are interleaved.
Rows rows_of(const Checks& check, const Tensor& y, int64_t tokens) {
  check.require(y.dim() == 2 || y.dim() == 3, "y must have the shape [tokens, out] or [tokens, runs, run], got ",
                format_shape(y.sizes()));
  const bool runs = y.dim() == 3;
  check.shape(y, "y",
              runs ? std::initializer_list<int64_t>{tokens, kAny, kAny} : std::initializer_list<int64_t>{tokens, kAny});
  const int64_t run = y.size(y.dim() - 1);
  if (y.numel() == 0) return {runs ? y.size(1) * run : run, std::max<int64_t>(run, 1), run};
  check.require(run == 1 || y.stride(y.dim() - 1) == 1, "y must be contiguous in its last dimension, got strides ",
                format_shape(y.strides()));
  if (!runs) {
    check.rows_apart(y, "y");
    return {run, run, run};
  }
  check.require(run % 16 == 0, "y must have runs of a multiple of 16, got ", run);
  const int64_t row = (y.size(1) - 1) * y.stride(1) + run;
  check.require((y.size(1) == 1 || y.stride(1) >= run) && (tokens == 1 || y.stride(0) >= row),
                "y is changed in place and must not overlap itself, got strides ", format_shape(y.strides()));
  return {y.size(1) * run, run, y.stride(1)};
}

const int32_t* indices(const Checks& check, const Tensor& t, const char* name, int64_t size) {
  check.shape(t, name, {size});
  check.dtype(t, name, ScalarType::Int);
  check.contiguous(t, name);
  return static_cast<const int32_t*>(t.data_ptr());
}

void add_lora(const Tensor& y, const Tensor& x, const Tensor& a, const Tensor& b, const Tensor& adapter_ids,
              const std::optional<Tensor>& ranks, const std::optional<Tensor>& norm_weight, double eps) {
  const Checks check("add_lora", y);
  check.shape(x, "x", {kAny, kAny});
  check.rows_contiguous(x, "x");
  const DType dtype = check.float_dtype(x, "x");
  const int64_t tokens = x.size(0), in = x.size(1);
  const Rows rows = rows_of(check, y, tokens);
  check.dtype(y, "y", x.scalar_type());
  check.shape(a, "a", {kAny, kAny, in});
  check.contiguous(a, "a");
  const DType weight_dtype = check.float_dtype(a, "a");
  const int64_t slots = a.size(0), max_rank = a.size(1);
  check.shape(b, "b", {slots, max_rank, rows.out});
  check.contiguous(b, "b");
  check.dtype(b, "b", a.scalar_type());
  VectorArg norm;
  if (norm_weight) {
    check.shape(*norm_weight, "norm_weight", {in});
    check.contiguous(*norm_weight, "norm_weight");
    norm = {norm_weight->data_ptr(), check.fp32_or(dtype, *norm_weight, "norm_weight")};
  }
  AddLoraParams params{
      .y = y.data_ptr(),
      .x = x.data_ptr(),
      .a = a.data_ptr(),
      .b = b.data_ptr(),
      .adapter_ids = indices(check, adapter_ids, "adapter_ids", tokens),
      .ranks = ranks ? indices(check, *ranks, "ranks", slots) : nullptr,
      .norm_weight = norm,
      .hidden = nullptr,
      .tokens = tokens,
      .in = in,
      .out = rows.out,
      .slots = slots,
      .max_rank = max_rank,
      .x_stride = x.stride(0),
      .y_stride = y.stride(0),
      .run = rows.run,
      .run_stride = rows.run_stride,
      .eps = static_cast<float>(eps),
      .dtype = dtype,
      .weight_dtype = weight_dtype,
  };
  if (rows.out == 0 || max_rank == 0) return;
  Tensor hidden;
  if (gpu_of(x) != nullptr) {
    hidden = new_tensor(x, {tokens, max_rank}, ScalarType::Float);
    params.hidden = static_cast<float*>(hidden.data_ptr());
  }
  FASTINFER_LAUNCH(x, add_lora, params);
}

}  // namespace

FASTINFER_OPERATORS(m) {
  m.impl("add_lora", TORCH_BOX(&add_lora));
}

}  // namespace fastinfer
