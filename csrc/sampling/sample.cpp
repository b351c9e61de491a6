#include "sampling/sample.h"

#include <cmath>
#include <tuple>

#include "binding/checks.h"
#include "binding/launch.h"
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
    if (p.bias_start != nullptr) {
      const int32_t begin = p.bias_start[i], end = p.bias_start[i + 1];
      check.require(begin <= end, "bias_start must not fall, got ", begin, " and then ", end, " at ", i + 1);
    }
    if (p.penalties == nullptr) continue;
    const float* penalties = p.penalties + 3 * i;
    check.require(penalties[0] > 0 && std::isfinite(penalties[0]), "penalties[", i,
                  ", 0] (repetition) must be finite and above 0, got ", penalties[0]);
    for (int j = 1; j < 3; ++j) {
      check.require(std::isfinite(penalties[j]), "penalties[", i, ", ", j, "] must be finite, got ", penalties[j]);
    }
  }
}

void check_biases(const Checks& check, const SampleParams& p) {
  check.require(p.bias_start[0] == 0 && p.bias_start[p.rows] == p.num_biases,
                "bias_start must run from 0 to the number of bias_tokens, ", p.num_biases, ", got ", p.bias_start[0],
                " to ", p.bias_start[p.rows]);
  for (int64_t i = 0; i < p.num_biases; ++i) {
    check.require(p.bias_tokens[i] >= 0 && p.bias_tokens[i] < p.vocab, "bias_tokens[", i, "] must be in [0, ", p.vocab,
                  "), got ", p.bias_tokens[i]);
    check.require(p.bias_values[i] < INFINITY, "bias_values[", i, "] must be a number below +inf, got ",
                  p.bias_values[i]);
  }
}

std::tuple<Tensor, Tensor, Tensor, Tensor> sample(
    const Tensor& logits, const Tensor& temperature, const Tensor& top_k, const Tensor& top_p, const Tensor& min_p,
    const Tensor& seeds, const Tensor& positions, const std::optional<Tensor>& penalties,
    const std::optional<Tensor>& output_counts, const std::optional<Tensor>& prompt_mask,
    const std::optional<Tensor>& mask, const std::optional<Tensor>& bias_start,
    const std::optional<Tensor>& bias_tokens, const std::optional<Tensor>& bias_values,
    std::optional<int64_t> num_logprobs) {
  const Checks check("sample", logits);
  const auto* values = data<float>(check, logits, "logits", {kAny, kAny}, ScalarType::Float);
  const int64_t rows = logits.size(0), vocab = logits.size(1), mask_words = (vocab + 31) / 32;
  check.require(vocab > 0, "logits must have at least one column, got none");
  check.require(vocab <= kMaxVocab, "logits must have at most ", kMaxVocab, " columns, got ", vocab);
  check.require(penalties.has_value() || (!output_counts.has_value() && !prompt_mask.has_value()),
                "penalties must be given where output_counts or prompt_mask is, got None");
  check.require(bias_start.has_value() == bias_tokens.has_value() && bias_start.has_value() == bias_values.has_value(),
                "bias_start, bias_tokens and bias_values must be given together");
  const int64_t num_biases = bias_tokens.has_value() ? bias_tokens->numel() : 0;
  check.require(!bias_values.has_value() || bias_values->numel() == num_biases,
                "bias_tokens and bias_values must be equally long, got ", num_biases, " and ",
                bias_values.has_value() ? bias_values->numel() : 0);
  const bool has_logprobs = num_logprobs.has_value();
  const int64_t count = num_logprobs.value_or(0);
  check.require(count >= 0 && count <= kMaxLogprobs, "num_logprobs must be None or in [0, ", kMaxLogprobs, "], got ",
                count);
  Tensor tokens = new_tensor(logits, {rows}, ScalarType::Long);
  Tensor logprobs = new_tensor(logits, {has_logprobs ? rows : 0});
  Tensor top_logprobs = new_tensor(logits, {rows, count});
  Tensor top_tokens = new_tensor(logits, {rows, count}, ScalarType::Long);
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
      .bias_start = data<int32_t>(check, bias_start, "bias_start", {rows + 1}, ScalarType::Int),
      .bias_tokens = data<int32_t>(check, bias_tokens, "bias_tokens", {num_biases}, ScalarType::Int),
      .bias_values = data<float>(check, bias_values, "bias_values", {num_biases}, ScalarType::Float),
      .tokens = static_cast<int64_t*>(tokens.data_ptr()),
      .logprobs = has_logprobs ? static_cast<float*>(logprobs.data_ptr()) : nullptr,
      .top_logprobs = static_cast<float*>(top_logprobs.data_ptr()),
      .top_tokens = static_cast<int64_t*>(top_tokens.data_ptr()),
      .scratch = nullptr,
      .parts = nullptr,
      .arrived = nullptr,
      .rows = rows,
      .vocab = vocab,
      .mask_words = mask_words,
      .num_biases = num_biases,
      .num_logprobs = count,
  };
  Tensor scratch, parts;
  if (gpu_of(logits) == nullptr) {
    check_values(check, params);
    if (bias_start.has_value()) check_biases(check, params);
  } else {
    const bool modified = penalties.has_value() || bias_start.has_value() || mask.has_value();
    const cuda::SamplePlan plan = cuda::plan_sample(rows, vocab, modified);
    if (modified) {
      scratch = new_tensor(logits, {plan.scratch_bytes / static_cast<int64_t>(sizeof(float))});
      params.scratch = static_cast<float*>(scratch.data_ptr());
    }
    if (plan.parts_bytes > 0) {
      parts = new_tensor(logits, {plan.parts_bytes}, ScalarType::Byte);
      params.parts = parts.data_ptr();
      params.arrived = arrival_counters(logits, rows);
    }
  }
  FASTINFER_LAUNCH(logits, sample, params);
  return {tokens, logprobs, top_logprobs, top_tokens};
}

}  // namespace

FASTINFER_OPERATORS(m) {
  m.impl("sample", TORCH_BOX(&sample));
}

}  // namespace fastinfer
