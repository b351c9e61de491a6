#include "gemm/gemm_kernel_cuda.h"
#include "quant/int8_dequantize_cuda.h"

namespace fastinfer::cuda {

void int8_gemm(const QuantizedGemmParams& p, void* stream) {
  launch_gemm<Int8Weight>("int8_gemm", p, stream);
}

}  // namespace fastinfer::cuda
