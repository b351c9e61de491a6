// A few microseconds a token beside the milliseconds of its experts: compiled once, for every instruction set.
#include <algorithm>
#include <cmath>

#include "common/cpu/parallel.h"
#include "moe/route_experts.h"

namespace fastinfer::cpu {
namespace {

template <class T>
void route_token(const RouteExpertsParams& p, int64_t token) {
  const T* logits = static_cast<const T*>(p.logits) + token * p.logits_stride;
  float* weights = p.expert_weights + token * p.top_k;
  int32_t* ids = p.expert_ids + token * p.top_k;
  uint64_t keys[kMostExperts];
  for (int expert = 0; expert < p.experts; ++expert) keys[expert] = expert_key(to_float(logits[expert]), expert);
  const float largest = logit_of(*std::max_element(keys, keys + p.experts));
  float total = 0.0f, chosen = 0.0f;
  for (int expert = 0; expert < p.experts; ++expert) total += std::exp(to_float(logits[expert]) - largest);
  for (int i = 0; i < p.top_k; ++i) {
    uint64_t* const best = std::max_element(keys, keys + p.experts);
    ids[i] = expert_of(*best);
    weights[i] = std::exp(logit_of(*best) - largest) / total;
    chosen += weights[i];
    *best = 0;
  }
  for (int i = 0; p.renormalize && i < p.top_k; ++i) weights[i] /= chosen;
}

// Sorts rows by expert, by counting. Rows of one expert keep their order.
void sort_rows(const RouteExpertsParams& p) {
  const int64_t rows = p.tokens * p.top_k;
  std::fill_n(p.expert_start, p.experts + 1, 0);
  for (int64_t row = 0; row < rows; ++row) ++p.expert_start[p.expert_ids[row] + 1];
  for (int expert = 0; expert < p.experts; ++expert) p.expert_start[expert + 1] += p.expert_start[expert];
  int32_t next[kMostExperts];
  std::copy_n(p.expert_start, p.experts, next);
  for (int64_t row = 0; row < rows; ++row) p.row_ids[next[p.expert_ids[row]]++] = static_cast<int32_t>(row);
}

}  // namespace

void route_experts(const RouteExpertsParams& p) {
  dispatch(p.dtype, [&]<class T>(T) {
    parallel_for(p.tokens, [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) route_token<T>(p, token);
    });
  });
  sort_rows(p);
}

}  // namespace fastinfer::cpu
