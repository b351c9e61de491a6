// The bindings that int4_gemm and int8_gemm share, with one weight and with a stack of experts.
#pragma once

#include "gemm/grouped_gemm_binding.h"
#include "quant/quantized_weight_binding.h"

namespace fastinfer {

template <int kBits>
Tensor quantized_gemm(const Output& output, const Tensor& x, const Tensor& qweight, const Tensor& scales,
                      const std::optional<Tensor>& mins, int64_t out_features, const std::optional<Tensor>& bias,
                      const std::optional<Tensor>& norm_weight, double eps,
                      const std::optional<std::string>& activation, const std::optional<Tensor>& residual,
                      int64_t activation_bits) {
  const Checks check(kBits == 4 ? "int4_gemm" : "int8_gemm", x);
  const QuantizedWeight weight = quantized_weight(check, qweight, scales, mins, out_features, kBits);
  Tensor out;
  const GemmArgs args{x, bias, norm_weight, eps, activation, residual};
  const GemmParams common = gemm_params(check, args, out_features, qweight.size(1) * kBlockInputs, output, out);
  check_activation_bits(check, x, activation_bits);
  QuantizedGemmParams params{common, weight, static_cast<int>(activation_bits)};
  params.weight_memory = memory_of(qweight);
  GemmScratch scratch;
  if (gpu_of(x) != nullptr) {
    check_quantized_aligned(check, qweight, scales, mins);
    constexpr auto kFormat = kBits == 4 ? cuda::WeightFormat::kInt4 : cuda::WeightFormat::kInt8;
    prepare_gpu(check, args, kFormat, weight.group_blocks * kBlockInputs, params, scratch);
  }
  if constexpr (kBits == 4) {
    FASTINFER_LAUNCH(x, int4_gemm, params);
  } else {
    FASTINFER_LAUNCH(x, int8_gemm, params);
  }
  return out;
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

}  // namespace fastinfer
