#include "lora/add_lora.h"

#include <algorithm>

#include "binding/checks.h"
#include "binding/launch.h"
#include "binding/prompt_rows.h"

namespace fastinfer {
namespace {

struct Runs {
  int64_t out, run, run_stride;
};

// y is [rows, out], or [rows, runs, run]: gate or up of a product whose rows are interleaved.
Runs runs_of(const Checks& check, const Tensor& y) {
  check.require(y.dim() == 2 || y.dim() == 3, "y must have the shape [tokens, out] or [tokens, runs, run], got ",
                format_shape(y.sizes()));
  const bool has_runs = y.dim() == 3;
  const int64_t run = y.size(y.dim() - 1);
  if (y.numel() == 0) return {has_runs ? y.size(1) * run : run, std::max<int64_t>(run, 1), run};
  check.require(run == 1 || y.stride(y.dim() - 1) == 1, "y must be contiguous in its last dimension, got strides ",
                format_shape(y.strides()));
  if (!has_runs) {
    check.rows_apart(y, "y");
    return {run, run, run};
  }
  check.require(run % 16 == 0, "y must have runs of a multiple of 16, got ", run);
  const int64_t row = (y.size(1) - 1) * y.stride(1) + run;
  check.require((y.size(1) == 1 || y.stride(1) >= run) && (y.size(0) == 1 || y.stride(0) >= row),
                "y is changed in place and must not overlap itself, got strides ", format_shape(y.strides()));
  return {y.size(1) * run, run, y.stride(1)};
}

const int32_t* indices(const Checks& check, const Tensor& t, const char* name,
                       torch::headeronly::IntHeaderOnlyArrayRef shape) {
  check.shape(t, name, shape);
  check.dtype(t, name, ScalarType::Int);
  check.contiguous(t, name);
  return static_cast<const int32_t*>(t.data_ptr());
}

void add_lora(const Tensor& y, const Tensor& x, const Tensor& a, const Tensor& b, const Tensor& adapter_ids,
              const std::optional<Tensor>& expert_ids, const std::optional<Tensor>& ranks,
              const std::optional<Tensor>& norm_weight, double eps) {
  const Checks check("add_lora", y);
  check.shape(x, "x", {kAny, kAny});
  check.rows_contiguous(x, "x");
  const DType dtype = check.float_dtype(x, "x");
  const int64_t inputs = x.size(0), in = x.size(1);
  const Runs runs = runs_of(check, y);
  check.dtype(y, "y", x.scalar_type());
  check.shape(adapter_ids, "adapter_ids", {expert_ids ? kAny : inputs});
  const int64_t tokens = adapter_ids.size(0);
  int64_t experts = 1, rows_per_token = 1, expert_tokens = tokens;
  if (expert_ids) {
    check.shape(*expert_ids, "expert_ids", {kAny, kAny});
    expert_tokens = expert_ids->size(0);
    check.require(expert_tokens == tokens || expert_tokens == 1, "expert_ids must have ", tokens, " rows or one, got ",
                  expert_tokens);
    rows_per_token = expert_ids->size(1);
    check.require(a.dim() == 4, "a must have the shape [slots, experts, max_rank, in] with expert_ids, got ",
                  format_shape(a.sizes()));
    experts = a.size(1);
    check.shape(a, "a", {kAny, kAny, kAny, in});
  } else {
    check.shape(a, "a", {kAny, kAny, in});
  }
  const int64_t num_rows = tokens * rows_per_token;
  check.require(y.size(0) == num_rows, "y must have ", num_rows, " rows, got ", y.size(0));
  check.require(inputs == num_rows || inputs == tokens, "x must have ", tokens, " or ", num_rows, " rows, got ",
                inputs);
  check.contiguous(a, "a");
  const DType weight_dtype = check.float_dtype(a, "a");
  const int64_t slots = a.size(0), max_rank = a.size(a.dim() - 2);
  if (expert_ids) {
    check.shape(b, "b", {slots, experts, max_rank, runs.out});
  } else {
    check.shape(b, "b", {slots, max_rank, runs.out});
  }
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
      .adapter_ids = indices(check, adapter_ids, "adapter_ids", {tokens}),
      .expert_ids = expert_ids ? indices(check, *expert_ids, "expert_ids", {expert_tokens, rows_per_token}) : nullptr,
      .ranks = nullptr,
      .norm_weight = norm,
      .hidden = nullptr,
      .m = num_rows,
      .rows_per_token = rows_per_token,
      .rows_per_input = inputs == num_rows ? 1 : rows_per_token,
      .in = in,
      .out = runs.out,
      .slots = slots,
      .experts = experts,
      .num_expert_ids = expert_tokens * rows_per_token,
      .max_rank = max_rank,
      .x_stride = x.stride(0),
      .y_stride = y.stride(0),
      .run = runs.run,
      .run_stride = runs.run_stride,
      .eps = static_cast<float>(eps),
      .dtype = dtype,
      .weight_dtype = weight_dtype,
      .first_prompt_row = std::min(first_prompt_row(), tokens) * rows_per_token,
  };
  if (ranks && expert_ids) {
    params.ranks = indices(check, *ranks, "ranks", {slots, experts});
  } else if (ranks) {
    params.ranks = indices(check, *ranks, "ranks", {slots});
  }
  if (num_rows == 0 || runs.out == 0 || max_rank == 0) return;
  Tensor hidden;
  if (gpu_of(x) != nullptr) {
    hidden = new_tensor(x, {num_rows, max_rank}, ScalarType::Float);
    params.hidden = static_cast<float*>(hidden.data_ptr());
  }
  FASTINFER_LAUNCH(x, add_lora, params);
}

}  // namespace

FASTINFER_OPERATORS(m) {
  m.impl("add_lora", TORCH_BOX(&add_lora));
}

}  // namespace fastinfer
