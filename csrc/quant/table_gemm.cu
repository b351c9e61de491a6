#include "fused/gemm_kernel_cuda.h"

namespace fastinfer::cuda {

void table_gemm(const TableGemmParams& p, void* stream) {
  launch_gemm<TableWeight>("table_gemm", p, stream);
}

}  // namespace fastinfer::cuda
