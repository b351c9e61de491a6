// Residual + the sum of the ranks' activations, and its RMSNorm: what follows a product whose inputs ranks share.
#pragma once

#include "parallel/all_reduce.h"

namespace fastinfer {

struct AllReduceAddRmsNormParams {
  AllReduceParams sum;  // x and out: [rows, hidden]; out receives the normalised rows
  void* residual;       // [rows, hidden]: receives residual + sum, which is then normalised
  const void* weight;   // [hidden]
  int64_t rows;
  int64_t hidden;
  float eps;
  DType weight_dtype;
  bool constant_weights;  // CUDA: the kernel before has not written the weight
};

namespace cpu {
FASTINFER_API void all_reduce_add_rms_norm(const AllReduceAddRmsNormParams& params);
}
namespace cuda {
FASTINFER_API void all_reduce_add_rms_norm(const AllReduceAddRmsNormParams& params, void* stream);
}

}  // namespace fastinfer
