// A cache of four bits an element, as store_kv_cache writes it and paged_attention reads it. A head's elements are
// scale * q + minimum, q in 0..15, with a scale and a minimum for each group of them; two elements share a byte, the
// first one in its lower half.
#pragma once

#include "common/dtype.h"

namespace fastinfer {

// Elements of a group. Keys have outliers, which smaller groups keep to themselves: docs/performance.md has figures.
inline constexpr int kInt4KeyGroup = 16;
inline constexpr int kInt4ValueGroup = 64;
inline constexpr int kInt4Levels = 15;
inline constexpr float kInt4Limit = 65504.0f;  // fp16's

struct Int4Scale {
  Float16 scale, minimum;
};

// The number of groups of a head. The last one may be smaller.
FASTINFER_HOST_DEVICE constexpr int int4_groups(int head_dim, int group) {
  return (head_dim + group - 1) / group;
}

}  // namespace fastinfer
