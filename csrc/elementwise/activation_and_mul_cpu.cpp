#include "elementwise/activation_and_mul_cpu.h"

#include "common/cpu/parallel.h"

namespace fastinfer::cpu::FASTINFER_ISA {

void activation_and_mul(const ActivationAndMulParams& p) {
  dispatch(p.dtype, [&]<class T>(T) {
    parallel_for(p.rows, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const T* x = static_cast<const T*>(p.x) + row * (p.gated ? 2 * p.d : p.d);
        T* out = static_cast<T*>(p.out) + row * p.d;
        for_each_vector(p.d, [&](int64_t i, int64_t lanes) {
          f32v v = activate(p.activation, load_lanes(x + i, lanes));
          if (p.gated) v *= load_lanes(x + p.d + i, lanes);
          store_lanes(out + i, v, lanes);
        });
      }
    });
  });
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
