#include "quant/quantized_gemm_binding.h"

namespace fastinfer {

FASTINFER_CPU_OPERATORS(m) {
  impl_with_out<&quantized_gemm<5>>(m, "int5_gemm");
  impl_with_out<&grouped_quantized_gemm<5>>(m, "grouped_int5_gemm");
}

}  // namespace fastinfer
