#include "gemm/gemm_kernel_cuda.h"

namespace fastinfer::cuda {

void gemm(const DenseGemmParams& p, void* stream) {
  launch_gemm<DenseWeight>("gemm", p, stream);
}

}  // namespace fastinfer::cuda
