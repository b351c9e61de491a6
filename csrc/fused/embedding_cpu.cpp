// Copies of bytes: compiled once, for every instruction set.
#include <cstring>

#include "common/cpu/parallel.h"
#include "fused/embedding.h"

namespace fastinfer::cpu {

void embedding(const EmbeddingParams& p) {
  parallel_for(p.tokens, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      std::memcpy(static_cast<char*>(p.out) + token * p.row_bytes,
                  static_cast<const char*>(p.weight) + p.ids[token] * p.row_bytes, p.row_bytes);
    }
  });
}

}  // namespace fastinfer::cpu
