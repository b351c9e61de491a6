#include "fused/activation_and_mul_cpu.h"

#include "common/cpu/parallel.h"

namespace fastinfer::cpu::FASTINFER_ISA {

void activation_and_mul(const ActivationAndMulParams& p) {
  dispatch(p.dtype, [&]<class T>(T) {
    parallel_for(p.rows, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const T* gate = static_cast<const T*>(p.x) + row * 2 * p.d;
        const T* up = gate + p.d;
        T* out = static_cast<T*>(p.out) + row * p.d;
        for_each_vector(p.d, [&](int64_t i, int64_t lanes) {
          const f32v activated = activate(p.activation, load_lanes(gate + i, lanes));
          store_lanes(out + i, activated * load_lanes(up + i, lanes), lanes);
        });
      }
    });
  });
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
