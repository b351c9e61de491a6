#include "quant/quantized_gemm_binding.h"

namespace fastinfer {

FASTINFER_OPERATORS(m) {
  impl_with_out<&quantized_gemm<4>>(m, "int4_gemm");
  impl_with_out<&grouped_quantized_gemm<4>>(m, "grouped_int4_gemm");
}

}  // namespace fastinfer
