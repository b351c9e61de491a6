#include "gemm/grouped_gemm_binding.h"
#include "quant/quantized_weight_binding.h"

namespace fastinfer {
namespace {

Tensor lut_gemm(const Output& output, const Tensor& x, const Tensor& qweight, const Tensor& scales, const Tensor& table,
                int64_t out_features, const std::optional<Tensor>& bias, const std::optional<Tensor>& norm_weight,
                double eps, const std::optional<std::string>& activation, const std::optional<Tensor>& residual,
                int64_t activation_bits) {
  const Checks check("lut_gemm", x);
  check_lut_scales(check, scales);
  const QuantizedWeight weight = quantized_weight(check, qweight, scales, std::nullopt, out_features, 4);
  check_activation_bits(check, x, activation_bits);
  const float* entries = table_entries(check, table, activation_bits);
  Tensor out;
  const GemmArgs args{x, bias, norm_weight, eps, activation, residual};
  const GemmParams common = gemm_params(check, args, out_features, qweight.size(1) * kBlockInputs, output, out);
  LutGemmParams params{{common, weight, static_cast<int>(activation_bits)}, entries};
  params.weight_memory = memory_of(qweight);
  GemmScratch scratch;
  if (gpu_of(x) != nullptr) {
    check_quantized_aligned(check, qweight, scales, std::nullopt);
    prepare_gpu(check, args, cuda::WeightFormat::kLut, weight.group_blocks * kBlockInputs, params, scratch);
  }
  FASTINFER_LAUNCH(x, lut_gemm, params);
  return out;
}

Tensor grouped_lut_gemm(const Output& output, const Tensor& x, const Tensor& qweight, const Tensor& scales,
                        const Tensor& table, int64_t out_features, const Tensor& row_ids, const Tensor& expert_start,
                        const std::optional<Tensor>& bias, const std::optional<std::string>& activation,
                        int64_t activation_bits) {
  const Checks check("grouped_lut_gemm", x);
  check_lut_scales(check, scales);
  const QuantizedWeight weight = stacked_weight(check, qweight, scales, std::nullopt, out_features, 4);
  check_activation_bits(check, x, activation_bits);
  const float* entries = table_entries(check, table, activation_bits);
  const GroupedArgs args{x, row_ids, expert_start, bias, activation};
  Tensor out;
  const GemmParams common =
      grouped_params(check, args, qweight.size(0), out_features, qweight.size(2) * kBlockInputs, output, out);
  LutGemmParams params{{common, weight, static_cast<int>(activation_bits)}, entries};
  GemmScratch scratch;
  if (gpu_of(x) != nullptr) {
    check_quantized_aligned(check, qweight, scales, std::nullopt);
    prepare_grouped(check, args, cuda::WeightFormat::kLut, weight.group_blocks * kBlockInputs, params, scratch);
  }
  FASTINFER_LAUNCH(x, lut_gemm, params);
  return out;
}

}  // namespace

FASTINFER_OPERATORS(m) {
  impl_with_out<&lut_gemm>(m, "lut_gemm");
  impl_with_out<&grouped_lut_gemm>(m, "grouped_lut_gemm");
}

}  // namespace fastinfer
