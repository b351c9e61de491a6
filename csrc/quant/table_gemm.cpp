#include "fused/gemm_binding.h"
#include "quant/quantized_weight.h"

namespace fastinfer {
namespace {

Tensor table_gemm(const Output& output, const Tensor& x, const Tensor& qweight, const Tensor& scales,
                  const Tensor& table, int64_t out_features, const std::optional<Tensor>& bias,
                  const std::optional<Tensor>& norm_weight, double eps, const std::optional<std::string>& activation,
                  const std::optional<Tensor>& residual) {
  const Checks check("table_gemm", x);
  const QuantizedWeight weight = quantized_weight(check, qweight, scales, std::nullopt, out_features, 4);
  const float* entries = table_entries(check, table);
  Tensor out;
  const GemmArgs args{x, bias, norm_weight, eps, activation, residual};
  const GemmParams common = gemm_params(check, args, out_features, qweight.size(1) * kBlockInputs, output, out);
  TableGemmParams params{{common, weight, 32}, entries};
  params.weight_memory = memory_of(qweight);
  GemmScratch scratch;
  if (gpu_of(x) != nullptr) {
    check_quantized_aligned(check, qweight, scales, std::nullopt);
    prepare_gpu(check, args, cuda::WeightFormat::kTable, weight.group_blocks * kBlockInputs, params, scratch);
  }
  FASTINFER_LAUNCH(x, table_gemm, params);
  return out;
}

}  // namespace

FASTINFER_OPERATORS(m) {
  impl_with_out<&table_gemm>(m, "table_gemm");
}

}  // namespace fastinfer
