// The part of a grouped product's binding that does not depend on the weight's format. The kernels are those of the
// products with one weight, which also take a stack of experts (ExpertRows in gemm/gemm.h).
#pragma once

#include "gemm/gemm_binding.h"

namespace fastinfer {

struct GroupedArgs {
  const Tensor& x;
  const Tensor& row_ids;
  const Tensor& expert_start;
  const std::optional<Tensor>& bias;
  const std::optional<std::string>& activation;
};

// Checks the arguments, takes `out` from `output` and returns the parameters but for the weight.
GemmParams grouped_params(const Checks& check, const GroupedArgs& args, int64_t experts, int64_t n, int64_t k,
                          const Output& output, Tensor& out);

// prepare_gpu for a stack of experts.
void prepare_grouped(const Checks& check, const GroupedArgs& args, cuda::WeightFormat format, int64_t group,
                     GemmParams& params, GemmScratch& scratch);

}  // namespace fastinfer
