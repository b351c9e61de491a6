#include "quant/quantized_gemm_binding.h"

namespace fastinfer {

FASTINFER_OPERATORS(m) {
  m.impl("int8_gemm", TORCH_BOX(&quantized_gemm<8>));
}

}  // namespace fastinfer
