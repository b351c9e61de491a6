#include "gemm/grouped_gemm_binding.h"

#include "binding/prompt_rows.h"

namespace fastinfer {
namespace {

const int32_t* indices(const Checks& check, const Tensor& t, const char* name, int64_t size) {
  check.shape(t, name, {size});
  check.dtype(t, name, ScalarType::Int);
  check.contiguous(t, name);
  return static_cast<const int32_t*>(t.data_ptr());
}

// Checks the values of tensors in host memory.
void check_rows(const Checks& check, const ExpertRows& rows, int64_t count) {
  for (int expert = 0; expert < rows.experts; ++expert) {
    check.require(rows.start[expert] <= rows.start[expert + 1], "expert_start must not decrease, got ",
                  rows.start[expert], " before ", rows.start[expert + 1]);
  }
  check.require(rows.start[0] >= 0 && rows.start[rows.experts] <= count, "expert_start must be within the ", count,
                " rows of row_ids, got ", rows.start[0], " to ", rows.start[rows.experts]);
  for (int64_t i = 0; i < count; ++i) {
    check.require(rows.row_ids[i] >= 0 && rows.row_ids[i] < count, "row_ids[", i, "] must be in 0..", count - 1,
                  ", got ", rows.row_ids[i]);
  }
}

Tensor grouped_gemm(const Output& output, const Tensor& x, const Tensor& weight, const Tensor& row_ids,
                    const Tensor& expert_start, const std::optional<Tensor>& bias,
                    const std::optional<std::string>& activation) {
  const Checks check("grouped_gemm", x);
  check.shape(weight, "weight", {kAny, kAny, kAny});
  check.contiguous(weight, "weight");
  const GroupedArgs args{x, row_ids, expert_start, bias, activation};
  Tensor out;
  const GemmParams common = grouped_params(check, args, weight.size(0), weight.size(1), weight.size(2), output, out);
  DenseGemmParams params{common, weight.data_ptr(), check.float_dtype(weight, "weight")};
  GemmScratch scratch;
  if (gpu_of(x) != nullptr) {
    check_gpu_weight(check, x, weight, params.k);
    prepare_grouped(check, args, cuda::WeightFormat::kDense, 0, params, scratch);
  }
  FASTINFER_LAUNCH(x, gemm, params);
  return out;
}

}  // namespace

GemmParams grouped_params(const Checks& check, const GroupedArgs& args, int64_t experts, int64_t n, int64_t k,
                          const Output& output, Tensor& out) {
  check.shape(args.x, "x", {kAny, k});
  check.rows_contiguous(args.x, "x");
  const DType dtype = check.float_dtype(args.x, "x");
  const int64_t tokens = args.x.size(0);
  const int32_t* row_ids = indices(check, args.row_ids, "row_ids", kAny);
  const int64_t m = args.row_ids.size(0);
  check.require(tokens == 0 ? m == 0 : m % tokens == 0 && m <= INT32_MAX,
                "row_ids must have the length of a multiple of the ", tokens, " rows of x, below 2^31, got ", m);
  const ExpertRows rows{
      .start = indices(check, args.expert_start, "expert_start", experts + 1),
      .row_ids = row_ids,
      .experts = static_cast<int>(experts),
      .fan_out = tokens == 0 ? 1 : static_cast<int>(m / tokens),
  };
  if (gpu_of(args.x) == nullptr) check_rows(check, rows, m);
  const Activation activation = parse_activation(check, args.activation);
  const bool gated = activation != Activation::kNone;
  check_gated(check, gated, n);
  out = output.tensor(check, args.x, {m, gated ? n / 2 : n});
  return {
      .x = args.x.data_ptr(),
      .residual = nullptr,
      .out = out.data_ptr(),
      .norm_weight = {},
      .bias = vector_arg(check, args.bias, "bias", {experts, n}, dtype),
      .m = m,
      .n = n,
      .k = k,
      .x_stride = args.x.stride(0),
      .eps = 0.0f,
      .activation = activation,
      .dtype = dtype,
      .expert_rows = rows,
      .first_prompt_row = first_prompt_row(),
  };
}

void prepare_grouped(const Checks& check, const GroupedArgs& args, cuda::WeightFormat format, int64_t group,
                     GemmParams& params, GemmScratch& scratch) {
  prepare_gpu(check, {args.x, std::nullopt, std::nullopt, 0.0, args.activation, std::nullopt}, format, group, params,
              scratch);
}

FASTINFER_OPERATORS(m) {
  impl_with_out<&grouped_gemm>(m, "grouped_gemm");
}

}  // namespace fastinfer
