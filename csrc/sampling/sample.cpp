#include "sampling/sample.h"

#include <cmath>
#include <tuple>

#include "common/binding.h"
#include "common/device.h"

namespace fastinfer {
namespace {

template <class T>
const T* per_row(const Checks& check, const Tensor& t, const char* name, int64_t rows, ScalarType dtype) {
  check.shape(t, name, {rows});
  check.dtype(t, name, dtype);
  check.contiguous(t, name);
  return static_cast<const T*>(t.data_ptr());
}

std::tuple<Tensor, Tensor> sample(const Tensor& logits, const Tensor& temperature, const Tensor& top_k,
                                  const Tensor& top_p, const Tensor& min_p, const Tensor& seeds,
                                  const Tensor& positions) {
  const Checks check("sample", logits);
  check.shape(logits, "logits", {kAny, kAny});
  check.dtype(logits, "logits", ScalarType::Float);
  check.contiguous(logits, "logits");
  const int64_t rows = logits.size(0), vocab = logits.size(1);
  check.require(vocab > 0, "logits must have at least one column, got none");
  Tensor tokens = torch::stable::new_empty(logits, {rows}, ScalarType::Long);
  Tensor logprobs = torch::stable::new_empty(logits, {rows});
  const SampleParams params{
      .logits = static_cast<const float*>(logits.data_ptr()),
      .temperature = per_row<float>(check, temperature, "temperature", rows, ScalarType::Float),
      .top_k = per_row<int32_t>(check, top_k, "top_k", rows, ScalarType::Int),
      .top_p = per_row<float>(check, top_p, "top_p", rows, ScalarType::Float),
      .min_p = per_row<float>(check, min_p, "min_p", rows, ScalarType::Float),
      .seeds = per_row<int64_t>(check, seeds, "seeds", rows, ScalarType::Long),
      .positions = per_row<int64_t>(check, positions, "positions", rows, ScalarType::Long),
      .tokens = static_cast<int64_t*>(tokens.data_ptr()),
      .logprobs = static_cast<float*>(logprobs.data_ptr()),
      .rows = rows,
      .vocab = vocab,
  };
  for (int64_t i = 0; i < rows; ++i) {
    check.require(params.temperature[i] >= 0 && std::isfinite(params.temperature[i]), "temperature[", i,
                  "] must be finite and at least 0, got ", params.temperature[i]);
    check.require(params.top_k[i] >= 0, "top_k[", i, "] must be at least 0, got ", params.top_k[i]);
    check.require(params.top_p[i] > 0 && params.top_p[i] <= 1, "top_p[", i, "] must be in (0, 1], got ",
                  params.top_p[i]);
    check.require(params.min_p[i] >= 0 && params.min_p[i] <= 1, "min_p[", i, "] must be in [0, 1], got ",
                  params.min_p[i]);
  }
  cpu::sample(params);
  return {tokens, logprobs};
}

}  // namespace

FASTINFER_CPU_OPERATORS(m) {
  m.impl("sample", TORCH_BOX(&sample));
}

}  // namespace fastinfer
