#include "quant/int4_format_cpu.h"

namespace fastinfer::cpu::FASTINFER_ISA {

void int4_gemm(const QuantizedGemmParams& p) {
  if (p.weight.has_two_levels()) return run_quantized_gemm<Int4Format, TwoLevel<32> >(p);
  p.weight.scale_dtype == DType::kFloat16 ? run_quantized_gemm<Int4Format, Float16>(p)
                                          : run_quantized_gemm<Int4Format, float>(p);
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
