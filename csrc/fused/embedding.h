// Rows of a dense table, by token id.
#pragma once

#include <cstdint>

namespace fastinfer {

struct EmbeddingParams {
  const void* weight;  // [vocab, row_bytes]
  const int64_t* ids;  // [tokens]
  void* out;           // [tokens, row_bytes]
  int64_t tokens;
  int64_t vocab;
  int64_t row_bytes;  // a multiple of 2
};

namespace cpu {
void embedding(const EmbeddingParams& params);
}

namespace cuda {
void embedding(const EmbeddingParams& params, void* stream);
}

}  // namespace fastinfer
