#include "common/cpu/parallel.h"
#include "common/cpu/vec.h"
#include "moe/combine_experts.h"

namespace fastinfer::cpu::FASTINFER_ISA {

void combine_experts(const CombineExpertsParams& p) {
  dispatch(p.dtype, [&]<class T>(T) {
    parallel_for(p.tokens, [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) {
        const T* x = static_cast<const T*>(p.x) + token * p.top_k * p.hidden;
        const float* weights = p.expert_weights + token * p.top_k;
        const int64_t offset = token * p.hidden;
        for_each_vector(p.hidden, [&](int64_t i, int64_t lanes) {
          f32v sum{};
          for (int k = 0; k < p.top_k; ++k) {
            if (p.has(token * p.top_k, k)) sum += weights[k] * load_lanes(x + k * p.hidden + i, lanes);
          }
          if (p.residual != nullptr) sum += load_lanes(static_cast<const T*>(p.residual) + offset + i, lanes);
          store_lanes(static_cast<T*>(p.out) + offset + i, sum, lanes);
        });
      }
    });
  });
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
