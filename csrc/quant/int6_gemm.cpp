#include "quant/quantized_gemm_binding.h"

namespace fastinfer {
namespace {

Tensor int6_gemm(const Output& output, const Tensor& x, const Tensor& qweight, const Tensor& scales,
                 int64_t out_features, const std::optional<Tensor>& bias, const std::optional<Tensor>& norm_weight,
                 double eps, const std::optional<std::string>& activation, const std::optional<Tensor>& residual,
                 int64_t activation_bits) {
  return quantized_gemm<6>(output, x, qweight, scales, std::nullopt, out_features, bias, norm_weight, eps, activation,
                           residual, activation_bits);
}

Tensor grouped_int6_gemm(const Output& output, const Tensor& x, const Tensor& qweight, const Tensor& scales,
                         int64_t out_features, const Tensor& row_ids, const Tensor& expert_start,
                         const std::optional<Tensor>& bias, const std::optional<std::string>& activation,
                         int64_t activation_bits) {
  return grouped_quantized_gemm<6>(output, x, qweight, scales, std::nullopt, out_features, row_ids, expert_start, bias,
                                   activation, activation_bits);
}

}  // namespace

FASTINFER_CPU_OPERATORS(m) {
  impl_with_out<&int6_gemm>(m, "int6_gemm");
  impl_with_out<&grouped_int6_gemm>(m, "grouped_int6_gemm");
}

}  // namespace fastinfer
