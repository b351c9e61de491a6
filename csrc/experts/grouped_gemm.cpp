// Bindings of grouped_gemm, grouped_int8_gemm, grouped_int4_gemm and grouped_table_gemm: the kernels are those of gemm
// and its kin, which take a stack of experts (ExpertRows in fused/gemm.h).
#include "fused/gemm_binding.h"
#include "quant/quantized_weight.h"

namespace fastinfer {
namespace {

struct GroupedArgs {
  const Tensor& x;
  const Tensor& row_ids;
  const Tensor& expert_start;
  const std::optional<std::string>& activation;
};

const int32_t* indices(const Checks& check, const Tensor& t, const char* name, int64_t size) {
  check.shape(t, name, {size});
  check.dtype(t, name, ScalarType::Int);
  check.contiguous(t, name);
  return static_cast<const int32_t*>(t.data_ptr());
}

// Of tensors in host memory, whose values may be looked at.
void check_rows(const Checks& check, const ExpertRows& rows, int64_t count) {
  for (int expert = 0; expert < rows.experts; ++expert) {
    check.require(rows.start[expert] <= rows.start[expert + 1], "expert_start must not decrease, got ",
                  rows.start[expert], " before ", rows.start[expert + 1]);
  }
  check.require(rows.start[0] == 0 && rows.start[rows.experts] == count, "expert_start must go from 0 to the ", count,
                " rows of row_ids, got ", rows.start[0], " to ", rows.start[rows.experts]);
  for (int64_t i = 0; i < count; ++i) {
    check.require(rows.row_ids[i] >= 0 && rows.row_ids[i] < count, "row_ids[", i, "] must be in 0..", count - 1,
                  ", got ", rows.row_ids[i]);
  }
}

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
      .bias = {},
      .m = m,
      .n = n,
      .k = k,
      .x_stride = args.x.stride(0),
      .eps = 0.0f,
      .activation = activation,
      .dtype = dtype,
      .expert_rows = rows,
  };
}

void prepare_grouped(const Checks& check, const GroupedArgs& args, cuda::WeightFormat format, int64_t group,
                     GemmParams& params, GemmScratch& scratch) {
  prepare_gpu(check, {args.x, std::nullopt, std::nullopt, 0.0, args.activation, std::nullopt}, format, group, params,
              scratch);
}

Tensor grouped_gemm(const Output& output, const Tensor& x, const Tensor& weight, const Tensor& row_ids,
                    const Tensor& expert_start, const std::optional<std::string>& activation) {
  const Checks check("grouped_gemm", x);
  check.shape(weight, "weight", {kAny, kAny, kAny});
  check.contiguous(weight, "weight");
  const GroupedArgs args{x, row_ids, expert_start, activation};
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

// The first expert's slice is checked as a weight of its own; the others follow it.
QuantizedWeight stacked_weight(const Checks& check, const Tensor& qweight, const Tensor& scales,
                               const std::optional<Tensor>& mins, int64_t out_features, int bits) {
  check.require(qweight.dim() == 6 && qweight.size(0) > 0,
                "qweight must be a stack of packed weights, [experts, tiles, blocks, steps, 16, 4], got ",
                format_shape(qweight.sizes()));
  const int64_t experts = qweight.size(0);
  check.contiguous(qweight, "qweight");
  check.shape(scales, "scales", {experts, kAny, kAny, kTileRows});
  check.contiguous(scales, "scales");
  if (mins) {
    check.shape(*mins, "mins", {experts, kAny, kAny, kTileRows});
    check.contiguous(*mins, "mins");
  }
  const auto first = [](const Tensor& t) { return torch::stable::select(t, 0, 0); };
  return quantized_weight(check, first(qweight), first(scales), mins ? std::optional(first(*mins)) : std::nullopt,
                          out_features, bits);
}

template <int kBits>
Tensor grouped_quantized_gemm(const Output& output, const Tensor& x, const Tensor& qweight, const Tensor& scales,
                              const std::optional<Tensor>& mins, int64_t out_features, const Tensor& row_ids,
                              const Tensor& expert_start, const std::optional<std::string>& activation,
                              int64_t activation_bits) {
  const Checks check(kBits == 4 ? "grouped_int4_gemm" : "grouped_int8_gemm", x);
  const QuantizedWeight weight = stacked_weight(check, qweight, scales, mins, out_features, kBits);
  const GroupedArgs args{x, row_ids, expert_start, activation};
  Tensor out;
  const GemmParams common =
      grouped_params(check, args, qweight.size(0), out_features, qweight.size(2) * kBlockInputs, output, out);
  check_activation_bits(check, x, activation_bits);
  QuantizedGemmParams params{common, weight, static_cast<int>(activation_bits)};
  GemmScratch scratch;
  if (gpu_of(x) != nullptr) {
    check_quantized_aligned(check, qweight, scales, mins);
    constexpr auto kFormat = kBits == 4 ? cuda::WeightFormat::kInt4 : cuda::WeightFormat::kInt8;
    prepare_grouped(check, args, kFormat, weight.group_blocks * kBlockInputs, params, scratch);
  }
  if constexpr (kBits == 4) {
    FASTINFER_LAUNCH(x, int4_gemm, params);
  } else {
    FASTINFER_LAUNCH(x, int8_gemm, params);
  }
  return out;
}

Tensor grouped_table_gemm(const Output& output, const Tensor& x, const Tensor& qweight, const Tensor& scales,
                          const Tensor& table, int64_t out_features, const Tensor& row_ids, const Tensor& expert_start,
                          const std::optional<std::string>& activation) {
  const Checks check("grouped_table_gemm", x);
  const QuantizedWeight weight = stacked_weight(check, qweight, scales, std::nullopt, out_features, 4);
  const float* entries = table_entries(check, table);
  const GroupedArgs args{x, row_ids, expert_start, activation};
  Tensor out;
  const GemmParams common =
      grouped_params(check, args, qweight.size(0), out_features, qweight.size(2) * kBlockInputs, output, out);
  TableGemmParams params{{common, weight, 32}, entries};
  GemmScratch scratch;
  if (gpu_of(x) != nullptr) {
    check_quantized_aligned(check, qweight, scales, std::nullopt);
    prepare_grouped(check, args, cuda::WeightFormat::kTable, weight.group_blocks * kBlockInputs, params, scratch);
  }
  FASTINFER_LAUNCH(x, table_gemm, params);
  return out;
}

}  // namespace

FASTINFER_OPERATORS(m) {
  impl_with_out<&grouped_gemm>(m, "grouped_gemm");
  impl_with_out<&grouped_quantized_gemm<8>>(m, "grouped_int8_gemm");
  impl_with_out<&grouped_quantized_gemm<4>>(m, "grouped_int4_gemm");
  impl_with_out<&grouped_table_gemm>(m, "grouped_table_gemm");
}

}  // namespace fastinfer
