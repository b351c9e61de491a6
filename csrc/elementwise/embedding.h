// Rows of a dense table, by token id; or added to a residual.
#pragma once

#include <cstdint>

#include "common/api.h"
#include "common/cpu/isa.h"
#include "common/dtype.h"

namespace fastinfer {

struct EmbeddingParams {
  const void* weight;    // [vocab, hidden]
  const int64_t* ids;    // [tokens]
  const void* residual;  // [tokens, hidden] or null
  void* out;             // [tokens, hidden]
  int64_t tokens;
  int64_t vocab;
  int64_t hidden;
  DType weight_dtype;
  DType dtype;  // of residual and out
};

}  // namespace fastinfer

FASTINFER_CPU_KERNEL(embedding, EmbeddingParams)

namespace fastinfer::cuda {
FASTINFER_API void embedding(const EmbeddingParams& params, void* stream);
}
