#include "quant/quantized_gemm_binding.h"

namespace fastinfer {

FASTINFER_OPERATORS(m) {
  m.impl("int4_gemm", TORCH_BOX(&quantized_gemm<4>));
}

}  // namespace fastinfer
