// Columns of the activations in another order: that in which a weight was quantised.
#pragma once

#include <cstdint>

#include "common/api.h"

namespace fastinfer {

struct PermuteColumnsParams {
  const void* x;               // [tokens, cols]
  const int64_t* permutation;  // [cols]
  void* out;                   // [tokens, cols]
  int64_t x_stride;            // elements between tokens
  int64_t tokens;
  int64_t cols;
  bool wide;  // elements of 4 bytes instead of 2
};

namespace cpu {
FASTINFER_API void permute_columns(const PermuteColumnsParams& params);
}

namespace cuda {
FASTINFER_API void permute_columns(const PermuteColumnsParams& params, void* stream);
}

}  // namespace fastinfer
