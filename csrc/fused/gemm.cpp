#include "fused/gemm.h"

#include "common/device.h"
#include "fused/gemm_binding.h"

namespace fastinfer {
namespace {

Activation parse_activation(const Checks& check, const std::optional<std::string>& name) {
  if (!name) return Activation::kNone;
  if (*name == "silu") return Activation::kSilu;
  if (*name == "gelu_tanh") return Activation::kGeluTanh;
  if (*name == "gelu") return Activation::kGelu;
  check.require(false, "activation must be None, 'silu', 'gelu_tanh' or 'gelu', got '", *name, "'");
  return Activation::kNone;
}

VectorArg vector_arg(const Checks& check, const std::optional<Tensor>& t, const char* name, int64_t size,
                     DType activations) {
  if (!t) return {};
  check.shape(*t, name, {size});
  check.contiguous(*t, name);
  return {t->data_ptr(), check.fp32_or(activations, *t, name)};
}

Tensor gemm(const Tensor& x, const Tensor& weight, std::optional<Tensor> bias, std::optional<Tensor> norm_weight,
            double eps, std::optional<std::string> activation, std::optional<Tensor> residual) {
  const Checks check("gemm", x);
  check.shape(weight, "weight", {kAny, kAny});
  check.contiguous(weight, "weight");
  Tensor out;
  const GemmArgs args{x, bias, norm_weight, eps, activation, residual};
  const GemmParams common = gemm_params(check, args, weight.size(0), weight.size(1), out);
  cpu::gemm({common, weight.data_ptr(), check.float_dtype(weight, "weight")});
  return out;
}

}  // namespace

GemmParams gemm_params(const Checks& check, const GemmArgs& args, int64_t n, int64_t k, Tensor& out) {
  check.shape(args.x, "x", {kAny, k});
  const int64_t m = args.x.size(0);
  const DType dtype = check.float_dtype(args.x, "x");
  check.rows_contiguous(args.x, "x");
  const Activation activation = parse_activation(check, args.activation);
  const bool gated = activation != Activation::kNone;
  check.require(!gated || n % (2 * kTileRows) == 0, "a gated activation needs a multiple of ", 2 * kTileRows,
                " output features (gate and up in runs of 16), got ", n);
  check.require(!gated || !args.residual, "activation and residual must not be given together");
  if (args.residual) {
    check.shape(*args.residual, "residual", {m, n});
    check.dtype(*args.residual, "residual", args.x.scalar_type());
    check.contiguous(*args.residual, "residual");
  }
  out = torch::stable::new_empty(args.x, {m, gated ? n / 2 : n});
  return {
      .x = args.x.data_ptr(),
      .residual = args.residual ? args.residual->data_ptr() : nullptr,
      .out = out.data_ptr(),
      .norm_weight = vector_arg(check, args.norm_weight, "norm_weight", k, dtype),
      .bias = vector_arg(check, args.bias, "bias", n, dtype),
      .m = m,
      .n = n,
      .k = k,
      .x_stride = args.x.stride(0),
      .eps = static_cast<float>(args.eps),
      .activation = activation,
      .dtype = dtype,
  };
}

FASTINFER_CPU_OPERATORS(m) {
  m.impl("gemm", TORCH_BOX(&gemm));
}

}  // namespace fastinfer
