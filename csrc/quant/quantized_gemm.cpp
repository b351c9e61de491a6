// Bindings of int4_gemm and int8_gemm.
#include "common/device.h"
#include "fused/gemm_binding.h"
#include "quant/quantized_weight.h"

namespace fastinfer {
namespace {

template <int kBits>
Tensor quantized_gemm(const Tensor& x, const Tensor& qweight, const Tensor& scales, std::optional<Tensor> mins,
                      int64_t out_features, std::optional<Tensor> bias, std::optional<Tensor> norm_weight, double eps,
                      std::optional<std::string> activation, std::optional<Tensor> residual, int64_t activation_bits) {
  const Checks check(kBits == 4 ? "int4_gemm" : "int8_gemm", x);
  const QuantizedWeight weight = quantized_weight(check, qweight, scales, mins, out_features, kBits);
  Tensor out;
  const GemmArgs args{x, bias, norm_weight, eps, activation, residual};
  const GemmParams common = gemm_params(check, args, out_features, qweight.size(1) * kBlockInputs, out);
  check.require(activation_bits == 8 || activation_bits == 16 || activation_bits == 32,
                "activation_bits must be 8, 16 or 32, got ", activation_bits);
  const QuantizedGemmParams params{common, weight, static_cast<int>(activation_bits)};
  kBits == 4 ? cpu::int4_gemm(params) : cpu::int8_gemm(params);
  return out;
}

}  // namespace

FASTINFER_CPU_OPERATORS(m) {
  m.impl("int4_gemm", TORCH_BOX(&quantized_gemm<4>));
  m.impl("int8_gemm", TORCH_BOX(&quantized_gemm<8>));
}

}  // namespace fastinfer
