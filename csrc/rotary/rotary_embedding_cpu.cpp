#include "rotary/rotary_embedding_cpu.h"

#include "common/cpu/parallel.h"
#include "rotary/rotary_embedding.h"

namespace fastinfer::cpu::FASTINFER_ISA {

void rotary_embedding(const RotaryEmbeddingParams& p) {
  dispatch(p.dtype, [&]<class T>(T) {
    parallel_for(p.tokens, [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) {
        const float* table = p.cos_sin_cache + p.positions[token] * p.rotary_dim;
        const auto rotate = [&](T* heads, int count) {
          for (int h = 0; h < count; ++h) {
            rotate_head(heads + static_cast<int64_t>(h) * p.head_dim, table, p.rotary_dim, p.interleaved);
          }
        };
        rotate(static_cast<T*>(p.q) + token * p.q_stride, p.q_heads);
        rotate(static_cast<T*>(p.k) + token * p.k_stride, p.kv_heads);
      }
    });
  });
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
