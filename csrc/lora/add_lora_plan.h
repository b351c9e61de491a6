// How `add_lora` is launched: two kernels after each other.
#pragma once

#include "common/launch_config.h"

namespace fastinfer::cuda {

inline constexpr int kLoraRanks = 8;      // per block of the first kernel: one per warp
inline constexpr int kLoraTokens = 8;     // per block of the second kernel, which reads B once for all of them
inline constexpr int kLoraColumns = 256;  // likewise: one per thread

struct AddLoraPlan {
  LaunchConfig shrink, expand;
};

inline AddLoraPlan plan_add_lora(int64_t tokens, int64_t out, int64_t max_rank) {
  return {
      .shrink = {.grid = tokens,
                 .block = 32 * kLoraRanks,
                 .shared_bytes = kLoraRanks * sizeof(float),
                 .grid_y = static_cast<unsigned>((max_rank + kLoraRanks - 1) / kLoraRanks),
                 .dependent = true},
      .expand = {.grid = (tokens + kLoraTokens - 1) / kLoraTokens,
                 .block = kLoraColumns,
                 .grid_y = static_cast<unsigned>((out + kLoraColumns - 1) / kLoraColumns),
                 .dependent = true},
  };
}

}  // namespace fastinfer::cuda
