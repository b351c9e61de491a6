#include "gemm/gemm_kernel_cuda.h"
#include "quant/lut_dequantize_cuda.h"

namespace fastinfer::cuda {

void lut_gemm(const LutGemmParams& p, void* stream) {
  launch_gemm<LutWeight>("lut_gemm", p, stream);
}

}  // namespace fastinfer::cuda
