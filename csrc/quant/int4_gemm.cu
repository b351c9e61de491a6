#include "gemm/gemm_kernel_cuda.h"
#include "quant/int4_dequantize_cuda.h"

namespace fastinfer::cuda {

void int4_gemm(const QuantizedGemmParams& p, void* stream) {
  launch_gemm<Int4Weight>("int4_gemm", p, stream);
}

}  // namespace fastinfer::cuda
