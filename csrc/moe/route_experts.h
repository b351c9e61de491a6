// Chooses the experts of each token and their weights, and lists the rows of each expert.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/api.h"
#include "common/dtype.h"

namespace fastinfer {

inline constexpr int64_t kMostExperts = 1024;
inline constexpr int64_t kMostTopK = 32;
inline constexpr int64_t kMostGroups = 32;

struct RouteExpertsParams {
  const void* logits;         // [tokens, experts], rows logits_stride elements apart
  const float* bias;          // [experts], added to the scores, or to the logits, for the choice only; or null
  const float* expert_scale;  // [experts], factors of the experts' weights; or null
  float* expert_weights;      // [tokens, top_k]
  int32_t* expert_ids;        // [tokens, top_k]
  int32_t* row_ids;           // [tokens top_k]: row token * top_k + i stands behind the rows of smaller experts
  int32_t* expert_start;      // [experts + 1]: where an expert's rows begin in row_ids
  int64_t tokens;
  int64_t logits_stride;
  int experts;
  int top_k;
  int num_groups;  // of neighbouring experts; the chosen ones are of the top_groups best groups
  int top_groups;
  bool biased_logits;  // experts are chosen by logit + bias, not score + bias
  bool sigmoid;        // scores are sigmoids of the logits, not their softmax
  // SparseMixer: an expert's score is its softmax among those that are left when it is chosen, as far as they take part
  // with this tolerance, see takes_part.
  bool sparse;
  float tolerance;
  bool renormalize;
  float scale;                  // of the weights
  DType dtype;                  // of logits
  uint32_t* arrived = nullptr;  // CUDA: a counter, zero before and after the launch
};

// Whether experts are ordered by score or logit + bias. The logits have the same order as the scores, and fewer ties.
FASTINFER_HOST_DEVICE inline bool ordered_by_score(const RouteExpertsParams& p) {
  return p.bias != nullptr || p.num_groups > 1;
}

// Whether an expert takes part in SparseMixer's softmax for one with the largest logit of those that are left.
FASTINFER_HOST_DEVICE inline bool takes_part(float logit, float largest, float tolerance) {
  const float size = logit < 0.0f ? -logit : logit;
  return !((largest - logit) / (size > largest ? size : largest) > tolerance);  // 0 / 0 does
}

// A divisor that is 0 if the chosen sigmoids all are, whose weights are then 0, as in DeepSeek-V3.
inline constexpr float kLeastScore = 1e-20f;

// An integer that is larger for a larger logit and, among equal ones, for a smaller index: its maximum is the next
// expert. 0 is smaller than all. A NaN has its place too, so that an expert is always one of those that exist.
FASTINFER_HOST_DEVICE inline uint64_t expert_key(float logit, int expert) {
  logit += 0.0f;  // -0 is 0
  uint32_t bits;
  memcpy(&bits, &logit, sizeof bits);
  const uint32_t ordered = bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
  return uint64_t{ordered} << 32 | (0xffffffffu - static_cast<uint32_t>(expert));
}
FASTINFER_HOST_DEVICE inline int expert_of(uint64_t key) {
  return static_cast<int>(0xffffffffu - static_cast<uint32_t>(key));
}
FASTINFER_HOST_DEVICE inline float logit_of(uint64_t key) {
  const auto ordered = static_cast<uint32_t>(key >> 32);
  const uint32_t bits = ordered >> 31 != 0 ? ordered & 0x7fffffffu : ~ordered;
  float logit;
  memcpy(&logit, &bits, sizeof logit);
  return logit;
}

namespace cpu {
FASTINFER_API void route_experts(const RouteExpertsParams& params);
}

namespace cuda {
FASTINFER_API void route_experts(const RouteExpertsParams& params, void* stream);
}

}  // namespace fastinfer
