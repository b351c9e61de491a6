// Checks of positions and table, shared by the operators that rotate.
#pragma once

#include "binding/checks.h"
#include "binding/launch.h"

namespace fastinfer {

inline void check_rotary(const Checks& check, const Tensor& positions, const Tensor& cos_sin_cache, int64_t tokens,
                         int64_t head_dim) {
  check.shape(positions, "positions", {tokens});
  check.shape(cos_sin_cache, "cos_sin_cache", {kAny, kAny});
  const int64_t max_position = cos_sin_cache.size(0), rotary_dim = cos_sin_cache.size(1);
  check.require(rotary_dim % 2 == 0 && rotary_dim <= head_dim,
                "cos_sin_cache must have an even number of columns up to head_dim = ", head_dim, ", got ", rotary_dim);
  check.dtype(positions, "positions", ScalarType::Long);
  check.dtype(cos_sin_cache, "cos_sin_cache", ScalarType::Float);
  check.contiguous(positions, "positions");
  check.contiguous(cos_sin_cache, "cos_sin_cache");
  const auto* position = static_cast<const int64_t*>(positions.data_ptr());
  for (int64_t i = 0; gpu_of(positions) == nullptr && i < tokens; ++i) {
    check.require(position[i] >= 0 && position[i] < max_position, "positions[", i, "] must be in 0..", max_position - 1,
                  ", got ", position[i]);
  }
}

// Factors of the queries, one for each position of the table, or null.
inline const float* checked_query_scales(const Checks& check, const std::optional<Tensor>& query_scales,
                                         const Tensor& cos_sin_cache) {
  if (!query_scales) return nullptr;
  check.shape(*query_scales, "query_scales", {cos_sin_cache.size(0)});
  check.dtype(*query_scales, "query_scales", ScalarType::Float);
  check.contiguous(*query_scales, "query_scales");
  return static_cast<const float*>(query_scales->data_ptr());
}

}  // namespace fastinfer
