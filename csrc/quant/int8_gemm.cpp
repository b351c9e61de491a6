#include "quant/quantized_gemm_binding.h"

namespace fastinfer {

FASTINFER_OPERATORS(m) {
  impl_with_out<&quantized_gemm<8>>(m, "int8_gemm");
  impl_with_out<&grouped_quantized_gemm<8>>(m, "grouped_int8_gemm");
}

}  // namespace fastinfer
