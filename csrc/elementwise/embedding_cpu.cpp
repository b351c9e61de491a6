#include "elementwise/embedding.h"

#include "common/cpu/parallel.h"
#include "common/cpu/vec.h"

namespace fastinfer::cpu::FASTINFER_ISA {

void embedding(const EmbeddingParams& p) {
  dispatch(p.weight_dtype, [&]<class W>(W) {
    dispatch(p.dtype, [&]<class T>(T) {
      const auto* residual = static_cast<const T*>(p.residual);
      parallel_for(p.tokens, [&](int64_t begin, int64_t end) {
        for (int64_t token = begin; token < end; ++token) {
          const W* row = static_cast<const W*>(p.weight) + p.ids[token] * p.hidden;
          const int64_t offset = token * p.hidden;
          T* out = static_cast<T*>(p.out) + offset;
          for_each_vector(p.hidden, [&](int64_t i, int64_t lanes) {
            f32v v = load_lanes(row + i, lanes);
            if (residual != nullptr) v += load_lanes(residual + offset + i, lanes);
            store_lanes(out + i, v, lanes);
          });
        }
      });
    });
  });
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
