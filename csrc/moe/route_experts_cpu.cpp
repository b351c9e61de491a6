// A few microseconds a token beside the milliseconds of its experts: compiled once, for every instruction set.
#include <algorithm>
#include <cmath>
#include <functional>

#include "common/cpu/parallel.h"
#include "moe/route_experts.h"

namespace fastinfer::cpu {
namespace {

// Removes the experts that are not in the best groups. A group is as good as its two best experts together.
void keep_best_groups(const RouteExpertsParams& p, uint64_t* keys) {
  const int size = p.experts / p.num_groups;
  uint64_t groups[kMostGroups];
  for (int group = 0; group < p.num_groups; ++group) {
    uint64_t best[2];
    std::partial_sort_copy(keys + group * size, keys + (group + 1) * size, best, best + 2, std::greater<>());
    groups[group] = expert_key(logit_of(best[0]) + logit_of(best[1]), group);
  }
  for (int i = 0; i < p.top_groups; ++i) *std::max_element(groups, groups + p.num_groups) = 0;
  for (int group = 0; group < p.num_groups; ++group) {
    if (groups[group] != 0) std::fill_n(keys + group * size, size, 0);
  }
}

template <class T>
void route_token(const RouteExpertsParams& p, int64_t token) {
  const T* logits = static_cast<const T*>(p.logits) + token * p.logits_stride;
  float* weights = p.expert_weights + token * p.top_k;
  int32_t* ids = p.expert_ids + token * p.top_k;
  uint64_t keys[kMostExperts];
  for (int expert = 0; expert < p.experts; ++expert) keys[expert] = expert_key(to_float(logits[expert]), expert);
  float largest = 0.0f, total = 0.0f, chosen = 0.0f;
  if (!p.sigmoid) {
    largest = logit_of(*std::max_element(keys, keys + p.experts));
    for (int expert = 0; expert < p.experts; ++expert) total += std::exp(to_float(logits[expert]) - largest);
  }
  const auto score = [&](int expert) {
    const float logit = to_float(logits[expert]);
    return p.sigmoid ? 1.0f / (1.0f + std::exp(-logit)) : std::exp(logit - largest) / total;
  };
  if (ordered_by_score(p)) {
    for (int expert = 0; expert < p.experts; ++expert) {
      const float score_or_logit = p.biased_logits ? to_float(logits[expert]) : score(expert);
      keys[expert] = expert_key(score_or_logit + (p.bias != nullptr ? p.bias[expert] : 0.0f), expert);
    }
  }
  if (p.num_groups > 1) keep_best_groups(p, keys);
  // Of the one with the largest logit of those that are left.
  const auto sparse_score = [&](float best) {
    float sum = 0.0f;
    for (int expert = 0; expert < p.experts; ++expert) {
      const float logit = to_float(logits[expert]);
      if (keys[expert] != 0 && takes_part(logit, best, p.tolerance)) sum += std::exp(logit - best);
    }
    return 1.0f / sum;
  };
  for (int i = 0; i < p.top_k; ++i) {
    uint64_t* const best = std::max_element(keys, keys + p.experts);
    ids[i] = expert_of(*best);
    weights[i] = p.sparse ? sparse_score(logit_of(*best)) : score(ids[i]);
    chosen += weights[i];
    *best = 0;
  }
  const float divisor = p.renormalize ? chosen + kLeastScore : 1.0f;
  for (int i = 0; i < p.top_k; ++i) {
    weights[i] = weights[i] / divisor * p.scale * (p.expert_scale != nullptr ? p.expert_scale[ids[i]] : 1.0f);
  }
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
