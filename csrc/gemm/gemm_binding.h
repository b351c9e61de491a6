// The part of a matrix product's binding that does not depend on the weight's format.
#pragma once

#include <initializer_list>

#include "binding/output.h"
#include "gemm/gemm.h"

namespace fastinfer {

// The arguments other than the weight, which are the same in every schema.
struct GemmArgs {
  const Tensor& x;
  const std::optional<Tensor>& bias;
  const std::optional<Tensor>& norm_weight;
  double eps;
  const std::optional<std::string>& activation;
  const std::optional<Tensor>& residual;
};

// A vector that may be fp32 or have the activations' dtype; of a stack of experts a row for each.
VectorArg vector_arg(const Checks& check, const std::optional<Tensor>& t, const char* name,
                     std::initializer_list<int64_t> sizes, DType activations);

// Parses None or an activation's name in ops/gemm.py; throws for anything else.
Activation parse_activation(const Checks& check, const std::optional<std::string>& name);

// Checks that a gated activation gets whole runs of gate and up.
void check_gated(const Checks& check, bool gated, int64_t n);

// Checks what the GPU's kernels require of a dense weight.
void check_gpu_weight(const Checks& check, const Tensor& x, const Tensor& weight, int64_t k);

// Checks the arguments, takes `out` from `output` and returns the parameters but for the weight.
GemmParams gemm_params(const Checks& check, const GemmArgs& args, int64_t n, int64_t k, const Output& output,
                       Tensor& out);

// Tensors that must live until a product on a GPU is launched.
struct GemmScratch {
  std::optional<Tensor> x, workspace;
};

// Prepares a product on a GPU: checks what its kernels require, plans the launch, allocates the workspace, and runs the
// norm by a kernel before it. `group`: inputs that share a scale.
void prepare_gpu(const Checks& check, const GemmArgs& args, cuda::WeightFormat format, int64_t group,
                 GemmParams& params, GemmScratch& scratch);

// The GPU's kernels copy 16 bytes at a time.
void check_aligned(const Checks& check, const Tensor& t, const char* name);

}  // namespace fastinfer
