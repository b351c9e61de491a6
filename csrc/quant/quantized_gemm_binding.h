// The bindings that int4_gemm, int5_gemm, int6_gemm and int8_gemm share, with one weight and with a stack of experts.
#pragma once

#include "common/cpu/launch_graph.h"
#include "gemm/grouped_gemm_binding.h"
#include "quant/quantized_weight_binding.h"

namespace fastinfer {

// Prepares a launch on a GPU with prepare(format, inputs of a group), and launches the product of kBits. There is none
// of 5 or 6 bits on a GPU.
template <int kBits, class Prepare>
void launch_quantized_gemm(const Checks& check, const Tensor& x, const Tensor& qweight, const Tensor& scales,
                           const std::optional<Tensor>& mins, const QuantizedGemmParams& params,
                           const Prepare& prepare) {
  if constexpr (kBits == 5 || kBits == 6) {
    cpu::launch(kBits == 5 ? &cpu::int5_gemm : &cpu::int6_gemm, params);
    return;
  }
  if (gpu_of(x) != nullptr) {
    check_quantized_aligned(check, qweight, scales, mins);
    prepare(kBits == 4 ? cuda::WeightFormat::kInt4 : cuda::WeightFormat::kInt8,
            params.weight.group_blocks * kBlockInputs);
  }
  if constexpr (kBits == 4) {
    FASTINFER_LAUNCH(x, int4_gemm, params);
  } else if constexpr (kBits == 8) {
    FASTINFER_LAUNCH(x, int8_gemm, params);
  }
}

template <int kBits>
Tensor quantized_gemm(const Output& output, const Tensor& x, const Tensor& qweight, const Tensor& scales,
                      const std::optional<Tensor>& mins, int64_t out_features, const std::optional<Tensor>& bias,
                      const std::optional<Tensor>& norm_weight, double eps,
                      const std::optional<std::string>& activation, const std::optional<Tensor>& residual,
                      int64_t activation_bits) {
  constexpr const char* kName = kBits == 4   ? "int4_gemm"
                                : kBits == 5 ? "int5_gemm"
                                : kBits == 6 ? "int6_gemm"
                                             : "int8_gemm";
  const Checks check(kName, x);
  const QuantizedWeight weight = quantized_weight(check, qweight, scales, mins, out_features, kBits);
  Tensor out;
  const GemmArgs args{x, bias, norm_weight, eps, activation, residual};
  const GemmParams common = gemm_params(check, args, out_features, qweight.size(1) * kBlockInputs, output, out);
  check_activation_bits(check, x, activation_bits);
  QuantizedGemmParams params{common, weight, static_cast<int>(activation_bits)};
  params.weight_memory = memory_of(qweight);
  GemmScratch scratch;
  launch_quantized_gemm<kBits>(check, x, qweight, scales, mins, params, [&](auto format, int64_t group) {
    prepare_gpu(check, args, format, group, params, scratch);
  });
  return out;
}

template <int kBits>
Tensor grouped_quantized_gemm(const Output& output, const Tensor& x, const Tensor& qweight, const Tensor& scales,
                              const std::optional<Tensor>& mins, int64_t out_features, const Tensor& row_ids,
                              const Tensor& expert_start, const std::optional<Tensor>& bias,
                              const std::optional<std::string>& activation, int64_t activation_bits) {
  constexpr const char* kName = kBits == 4   ? "grouped_int4_gemm"
                                : kBits == 5 ? "grouped_int5_gemm"
                                : kBits == 6 ? "grouped_int6_gemm"
                                             : "grouped_int8_gemm";
  const Checks check(kName, x);
  const QuantizedWeight weight = stacked_weight(check, qweight, scales, mins, out_features, kBits);
  const GroupedArgs args{x, row_ids, expert_start, bias, activation};
  Tensor out;
  const GemmParams common =
      grouped_params(check, args, qweight.size(0), out_features, qweight.size(2) * kBlockInputs, output, out);
  check_activation_bits(check, x, activation_bits);
  QuantizedGemmParams params{common, weight, static_cast<int>(activation_bits)};
  GemmScratch scratch;
  launch_quantized_gemm<kBits>(check, x, qweight, scales, mins, params, [&](auto format, int64_t group) {
    prepare_grouped(check, args, format, group, params, scratch);
  });
  return out;
}

}  // namespace fastinfer
