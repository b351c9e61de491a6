#include "elementwise/activation_and_mul_cpu.h"

#include "common/cpu/parallel.h"

namespace fastinfer::cpu::FASTINFER_ISA {

void activation_and_mul(const ActivationAndMulParams& p) {
  dispatch(p.dtype, [&]<class T>(T) {
    parallel_for(p.rows, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const T* x = static_cast<const T*>(p.x) + row * p.x_stride;
        const T* up = p.up != nullptr ? static_cast<const T*>(p.up) + row * p.up_stride : nullptr;
        T* out = static_cast<T*>(p.out) + row * p.d;
        for_each_vector(p.d, [&](int64_t i, int64_t lanes) {
          const f32v v = load_lanes(x + i, lanes);
          if (p.limit > 0.0f) {
            const f32v limit = broadcast(p.limit);
            store_lanes(out + i, at_most(limit, activate(p.activation, v)) * within(limit, load_lanes(up + i, lanes)),
                        lanes);
            return;
          }
          store_lanes(
              out + i,
              up != nullptr ? activate_and_mul(p.activation, v, load_lanes(up + i, lanes)) : activate(p.activation, v),
              lanes);
        });
      }
    });
  });
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
