#include "quant/int4_format_cpu.h"

namespace fastinfer::cpu::FASTINFER_ISA {

void int4_gemm(const QuantizedGemmParams& p) {
  run_quantized_gemm<Int4Format>(p);
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
