// Calls two kernels, each compiled for every instruction set.
#include "norm/rms_norm.h"
#include "parallel/all_reduce_add_rms_norm.h"

namespace fastinfer::cpu {

void all_reduce_add_rms_norm(const AllReduceAddRmsNormParams& p) {
  all_reduce(p.sum);
  rms_norm({
      .x = p.sum.out,
      .residual = p.residual,
      .addend = nullptr,
      .weight = p.weight,
      .out = p.sum.out,
      .scales = nullptr,
      .rows = p.rows,
      .hidden = p.hidden,
      .eps = p.eps,
      .dtype = p.sum.dtype,
      .weight_dtype = p.weight_dtype,
  });
}

}  // namespace fastinfer::cpu
