// The part of a matrix product's binding that does not depend on the weight's format.
#pragma once

#include "binding/output.h"
#include "gemm/gemm.h"

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

// Of None, 'silu', 'gelu_tanh' or 'gelu'; anything else raises.
Activation parse_activation(const Checks& check, const std::optional<std::string>& name);

// A gated activation takes whole runs of gate and up.
void check_gated(const Checks& check, bool gated, int64_t n);

// Of a dense weight, what the GPU's kernels want.
void check_gpu_weight(const Checks& check, const Tensor& x, const Tensor& weight, int64_t k);

// Checks the arguments, takes `out` from `output` and returns the parameters but for the weight.
GemmParams gemm_params(const Checks& check, const GemmArgs& args, int64_t n, int64_t k, const Output& output,
                       Tensor& out);

// What a product on a GPU needs until it is launched.
struct GemmScratch {
  std::optional<Tensor> x, workspace;
};

// Where x is on a GPU: checks what its kernels want, plans the launch, allocates the workspace, and where the norm
// cannot be fused runs it first. `group`: inputs that share a scale.
void prepare_gpu(const Checks& check, const GemmArgs& args, cuda::WeightFormat format, int64_t group,
                 GemmParams& params, GemmScratch& scratch);

// The GPU's kernels copy 16 bytes at a time.
void check_aligned(const Checks& check, const Tensor& t, const char* name);

}  // namespace fastinfer
