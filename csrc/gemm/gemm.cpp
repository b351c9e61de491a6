#include "gemm/gemm.h"

#include "binding/batch_invariant.h"
#include "binding/constant_weights.h"
#include "binding/prompt_rows.h"
#include "gemm/gemm_binding.h"
#include "norm/rms_norm.h"

namespace fastinfer {
namespace {

bool aligned(const void* p) {
  return reinterpret_cast<uintptr_t>(p) % 16 == 0;
}

Tensor gemm(const Output& output, const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
            const std::optional<Tensor>& norm_weight, double eps, const std::optional<std::string>& activation,
            const std::optional<Tensor>& residual) {
  const Checks check("gemm", x);
  check.shape(weight, "weight", {kAny, kAny});
  check.contiguous(weight, "weight");
  Tensor out;
  const GemmArgs args{x, bias, norm_weight, eps, activation, residual};
  const GemmParams common = gemm_params(check, args, weight.size(0), weight.size(1), output, out);
  DenseGemmParams params{common, weight.data_ptr(), check.float_dtype(weight, "weight")};
  params.weight_memory = memory_of(weight);
  GemmScratch scratch;
  if (gpu_of(x) != nullptr) {
    check_gpu_weight(check, x, weight, params.k);
    prepare_gpu(check, args, cuda::WeightFormat::kDense, 0, params, scratch);
  }
  FASTINFER_LAUNCH(x, gemm, params);
  return out;
}

}  // namespace

VectorArg vector_arg(const Checks& check, const std::optional<Tensor>& t, const char* name,
                     std::initializer_list<int64_t> sizes, DType activations) {
  if (!t) return {};
  check.shape(*t, name, sizes);
  check.contiguous(*t, name);
  return {t->data_ptr(), check.fp32_or(activations, *t, name)};
}

Activation parse_activation(const Checks& check, const std::optional<std::string>& name) {
  if (!name) return Activation::kNone;
  if (*name == "silu") return Activation::kSilu;
  if (*name == "gelu_tanh") return Activation::kGeluTanh;
  if (*name == "gelu") return Activation::kGelu;
  if (*name == "clamped_swiglu") return Activation::kClampedSwiglu;
  check.require(false, "activation must be None, 'silu', 'gelu_tanh', 'gelu' or 'clamped_swiglu', got '", *name, "'");
  return Activation::kNone;
}

void check_gated(const Checks& check, bool gated, int64_t n) {
  check.require(!gated || n % (2 * kTileRows) == 0, "a gated activation needs a multiple of ", 2 * kTileRows,
                " output features (gate and up in runs of 16), got ", n);
}

void check_gpu_weight(const Checks& check, const Tensor& x, const Tensor& weight, int64_t k) {
  check.dtype(weight, "weight", x.scalar_type());
  check.require(k > 0 && k % 8 == 0, "weight must have a multiple of 8 columns on a GPU, got ", k);
  check_aligned(check, weight, "weight");
}

GemmParams gemm_params(const Checks& check, const GemmArgs& args, int64_t n, int64_t k, const Output& output,
                       Tensor& out) {
  check.shape(args.x, "x", {kAny, k});
  const int64_t m = args.x.size(0);
  const DType dtype = check.float_dtype(args.x, "x");
  check.rows_contiguous(args.x, "x");
  const Activation activation = parse_activation(check, args.activation);
  const bool gated = activation != Activation::kNone;
  check_gated(check, gated, n);
  check.require(!gated || !args.residual, "activation and residual must not be given together");
  if (args.residual) {
    check.shape(*args.residual, "residual", {m, n});
    check.dtype(*args.residual, "residual", args.x.scalar_type());
    check.contiguous(*args.residual, "residual");
  }
  const Tensor* const residual = args.residual ? &*args.residual : nullptr;
  out = output.tensor(check, args.x, {m, gated ? n / 2 : n}, std::nullopt, {residual});
  return {
      .x = args.x.data_ptr(),
      .residual = args.residual ? args.residual->data_ptr() : nullptr,
      .out = out.data_ptr(),
      .norm_weight = vector_arg(check, args.norm_weight, "norm_weight", {k}, dtype),
      .bias = vector_arg(check, args.bias, "bias", {n}, dtype),
      .m = m,
      .n = n,
      .k = k,
      .x_stride = args.x.stride(0),
      .eps = static_cast<float>(args.eps),
      .activation = activation,
      .dtype = dtype,
      .first_prompt_row = first_prompt_row(),
  };
}

void check_aligned(const Checks& check, const Tensor& t, const char* name) {
  check.require(aligned(t.data_ptr()), name, " must start at a multiple of 16 bytes on a GPU");
}

void prepare_gpu(const Checks& check, const GemmArgs& args, cuda::WeightFormat format, int64_t group,
                 GemmParams& params, GemmScratch& scratch) {
  const Tensor& x = args.x;
  check.require(params.dtype != DType::kFloat32, "x must be bfloat16 or float16 on a GPU, got float32");
  params.plan =
      cuda::gemm_plan(format, params.m, params.n, params.k, group, *gpu_of(x),
                      params.expert_rows.start != nullptr ? params.expert_rows.experts : 0, batch_invariant());
  if (params.plan.units == 0) return;

  const bool has_norm = params.norm_weight.data != nullptr;
  const bool as_it_is =
      aligned(params.x) && (has_norm ? x.is_contiguous() : x.size(0) == 1 || params.x_stride % 8 == 0);
  if (!as_it_is) {
    scratch.x = torch::stable::clone(x);
    params.x = scratch.x->data_ptr();
    params.x_stride = params.k;
  }
  if (has_norm) {  // in a kernel before, which the copies of constant weights do not wait for
    Tensor normed = new_tensor(x, {params.m, params.k});
    const RmsNormParams norm{
        .x = params.x,
        .residual = nullptr,
        .addend = nullptr,
        .weight = params.norm_weight.data,
        .out = normed.data_ptr(),
        .scales = nullptr,
        .rows = params.m,
        .hidden = params.k,
        .eps = params.eps,
        .dtype = params.dtype,
        .weight_dtype = params.norm_weight.dtype,
        .constant_weights = constant_weights(),
    };
    FASTINFER_LAUNCH(x, rms_norm, norm);
    scratch.x = normed;
    params.x = normed.data_ptr();
    params.x_stride = params.k;
    params.norm_weight = {};
  }
  if (params.plan.workspace_bytes > 0) {
    const auto bytes = static_cast<int64_t>(params.plan.workspace_bytes);
    scratch.workspace = new_tensor(x, {bytes}, ScalarType::Byte);
    params.workspace = scratch.workspace->data_ptr();
  }
  if (params.plan.worker_chunks > 0) params.counters = arrival_counters(x, params.plan.units);
  params.constant_weights = constant_weights();
}

FASTINFER_OPERATORS(m) {
  impl_with_out<&gemm>(m, "gemm");
}

}  // namespace fastinfer
