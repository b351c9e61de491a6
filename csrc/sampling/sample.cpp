#include "sampling/sample.h"

#include <cmath>
#include <tuple>

#include "common/binding.h"
#include "common/device.h"
#include "sampling/sample_filters.h"
#include "sampling/sample_plan.h"

namespace fastinfer {
namespace {

template <class T>
T* data(const Checks& check, const Tensor& t, const char* name, std::initializer_list<int64_t> shape,
        ScalarType dtype) {
  check.shape(t, name, shape);
  check.dtype(t, name, dtype);
  check.contiguous(t, name);
  return static_cast<T*>(t.data_ptr());
}

template <class T>
T* data(const Checks& check, const std::optional<Tensor>& t, const char* name, std::initializer_list<int64_t> shape,
        ScalarType dtype) {
  return t.has_value() ? data<T>(check, *t, name, shape, dtype) : nullptr;
}

// The parameters' values, where they lie in host memory.
void check_values(const Checks& check, const SampleParams& p) {
  for (int64_t i = 0; i < p.rows; ++i) {
    check.require(p.temperature[i] >= 0 && std::isfinite(p.temperature[i]), "temperature[", i,
                  "] must be finite and at least 0, got ", p.temperature[i]);
    check.require(p.top_k[i] >= 0, "top_k[", i, "] must be at least 0, got ", p.top_k[i]);
    check.require(p.top_p[i] > 0 && p.top_p[i] <= 1, "top_p[", i, "] must be in (0, 1], got ", p.top_p[i]);
    check.require(p.min_p[i] >= 0 && p.min_p[i] <= 1, "min_p[", i, "] must be in [0, 1], got ", p.min_p[i]);
    if (p.penalties == nullptr) continue;
    const float* penalties = p.penalties + 3 * i;
    check.require(penalties[0] > 0 && std::isfinite(penalties[0]), "penalties[", i,
                  ", 0] (repetition) must be finite and above 0, got ", penalties[0]);
    for (int j = 1; j < 3; ++j) {
      check.require(std::isfinite(penalties[j]), "penalties[", i, ", ", j, "] must be finite, got ", penalties[j]);
    }
  }
}

std::tuple<Tensor, Tensor, Tensor, Tensor> sample(const Tensor& logits, const Tensor& temperature, const Tensor& top_k,
                                                  const Tensor& top_p, const Tensor& min_p, const Tensor& seeds,
                                                  const Tensor& positions, const std::optional<Tensor>& penalties,
                                                  const std::optional<Tensor>& output_counts,
                                                  const std::optional<Tensor>& prompt_mask,
                                                  const std::optional<Tensor>& mask, int64_t num_logprobs) {
  const Checks check("sample", logits);
  const auto* values = data<float>(check, logits, "logits", {kAny, kAny}, ScalarType::Float);
  const int64_t rows = logits.size(0), vocab = logits.size(1), mask_words = (vocab + 31) / 32;
  check.require(vocab > 0, "logits must have at least one column, got none");
  check.require(vocab <= kMaxVocab, "logits must have at most ", kMaxVocab, " columns, got ", vocab);
  check.require(penalties.has_value() || (!output_counts.has_value() && !prompt_mask.has_value()),
                "penalties must be given where output_counts or prompt_mask is, got None");
  check.require(num_logprobs >= 0 && num_logprobs <= kMaxLogprobs, "num_logprobs must be in [0, ", kMaxLogprobs,
                "], got ", num_logprobs);
  Tensor tokens = new_tensor(logits, {rows}, ScalarType::Long);
  Tensor logprobs = new_tensor(logits, {rows});
  Tensor top_logprobs = new_tensor(logits, {rows, num_logprobs});
  Tensor top_tokens = new_tensor(logits, {rows, num_logprobs}, ScalarType::Long);
  SampleParams params{
      .logits = values,
      .temperature = data<float>(check, temperature, "temperature", {rows}, ScalarType::Float),
      .top_k = data<int32_t>(check, top_k, "top_k", {rows}, ScalarType::Int),
      .top_p = data<float>(check, top_p, "top_p", {rows}, ScalarType::Float),
      .min_p = data<float>(check, min_p, "min_p", {rows}, ScalarType::Float),
      .seeds = data<int64_t>(check, seeds, "seeds", {rows}, ScalarType::Long),
      .positions = data<int64_t>(check, positions, "positions", {rows}, ScalarType::Long),
      .penalties = data<float>(check, penalties, "penalties", {rows, 3}, ScalarType::Float),
      .output_counts = data<int32_t>(check, output_counts, "output_counts", {rows, vocab}, ScalarType::Int),
      .prompt_mask = data<int32_t>(check, prompt_mask, "prompt_mask", {rows, mask_words}, ScalarType::Int),
      .mask = data<int32_t>(check, mask, "mask", {rows, mask_words}, ScalarType::Int),
      .tokens = static_cast<int64_t*>(tokens.data_ptr()),
      .logprobs = static_cast<float*>(logprobs.data_ptr()),
      .top_logprobs = static_cast<float*>(top_logprobs.data_ptr()),
      .top_tokens = static_cast<int64_t*>(top_tokens.data_ptr()),
      .scratch = nullptr,
      .rows = rows,
      .vocab = vocab,
      .mask_words = mask_words,
      .num_logprobs = num_logprobs,
  };
  Tensor scratch;
  if (gpu_of(logits) == nullptr) {
    check_values(check, params);
  } else if (penalties.has_value() || mask.has_value()) {
    const int64_t bytes = cuda::plan_sample(rows, vocab, true).scratch_bytes;
    scratch = new_tensor(logits, {bytes / static_cast<int64_t>(sizeof(float))});
    params.scratch = static_cast<float*>(scratch.data_ptr());
  }
  FASTINFER_LAUNCH(logits, sample, params);
  return {tokens, logprobs, top_logprobs, top_tokens};
}

}  // namespace

FASTINFER_OPERATORS(m) {
  m.impl("sample", TORCH_BOX(&sample));
}

}  // namespace fastinfer
