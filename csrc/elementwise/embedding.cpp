#include "elementwise/embedding.h"

#include "binding/output.h"

namespace fastinfer {
namespace {

Tensor embedding(const Output& output, const Tensor& weight, const Tensor& ids, const std::optional<Tensor>& residual,
                 std::optional<ScalarType> dtype) {
  const Checks check("embedding", weight);
  check.shape(weight, "weight", {kAny, kAny});
  check.contiguous(weight, "weight");
  const DType weight_dtype = check.float_dtype(weight, "weight");
  check.require(!residual || !dtype, "dtype must be None with a residual, whose dtype the result has");
  check.shape(ids, "ids", {kAny});
  check.dtype(ids, "ids", ScalarType::Long);
  check.contiguous(ids, "ids");
  const int64_t tokens = ids.size(0), vocab = weight.size(0), hidden = weight.size(1);
  if (residual) {
    check.shape(*residual, "residual", {tokens, hidden});
    check.contiguous(*residual, "residual");
    check.float_dtype(*residual, "residual");
  }
  const auto* id = static_cast<const int64_t*>(ids.data_ptr());
  for (int64_t i = 0; gpu_of(ids) == nullptr && i < tokens; ++i) {
    check.require(id[i] >= 0 && id[i] < vocab, "ids[", i, "] must be in 0..", vocab - 1, ", got ", id[i]);
  }
  const ScalarType out_dtype = dtype.value_or((residual ? *residual : weight).scalar_type());
  const DType result_dtype = check.float_dtype(out_dtype, "dtype");
  const Tensor out = output.tensor(check, weight, {tokens, hidden}, out_dtype, {residual ? &*residual : nullptr});
  const EmbeddingParams params{
      .weight = weight.data_ptr(),
      .ids = id,
      .residual = residual ? residual->data_ptr() : nullptr,
      .out = out.data_ptr(),
      .tokens = tokens,
      .vocab = vocab,
      .hidden = hidden,
      .weight_dtype = weight_dtype,
      .dtype = result_dtype,
  };
  FASTINFER_LAUNCH(weight, embedding, params);
  return out;
}

}  // namespace

FASTINFER_OPERATORS(m) {
  impl_with_out<&embedding>(m, "embedding");
}

}  // namespace fastinfer
