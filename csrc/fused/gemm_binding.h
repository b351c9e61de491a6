// The part of a matrix product's binding that does not depend on the weight's format.
#pragma once

#include "common/binding.h"
#include "fused/gemm.h"

namespace fastinfer {

// The arguments around the weight, as they stand in every schema.
struct GemmArgs {
  const Tensor& x;
  const std::optional<Tensor>& bias;
  const std::optional<Tensor>& norm_weight;
  double eps;
  const std::optional<std::string>& activation;
  const std::optional<Tensor>& residual;
};

// Checks the arguments, allocates `out` and returns the parameters but for the weight.
GemmParams gemm_params(const Checks& check, const GemmArgs& args, int64_t n, int64_t k, Tensor& out);

}  // namespace fastinfer
