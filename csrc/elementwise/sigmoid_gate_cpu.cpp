#include "elementwise/sigmoid_gate.h"

#include "common/cpu/parallel.h"
#include "common/cpu/softplus.h"
#include "common/cpu/vec.h"

namespace fastinfer::cpu::FASTINFER_ISA {
namespace {

FASTINFER_INLINE f32v factor_of(f32v gate, bool is_softplus) {
  return is_softplus ? softplus(gate) : sigmoid(gate);
}

}  // namespace

void sigmoid_gate(const SigmoidGateParams& p) {
  dispatch(p.dtype, [&]<class T>(T) {
    parallel_for(p.rows, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const T* x = static_cast<const T*>(p.x) + row * p.width;
        const T* gate = static_cast<const T*>(p.gate) + row * p.gate_stride;
        T* out = static_cast<T*>(p.out) + row * p.width;
        if (p.group_width == 1) {
          for_each_vector(p.width, [&](int64_t i, int64_t lanes) {
            store_lanes(out + i, load_lanes(x + i, lanes) * factor_of(load_lanes(gate + i, lanes), p.softplus), lanes);
          });
          continue;
        }
        for (int64_t first = 0; first < p.width; first += p.group_width) {
          const f32v factor = factor_of(broadcast(to_float(*gate++)), p.softplus);
          for_each_vector(p.group_width, [&](int64_t i, int64_t lanes) {
            store_lanes(out + first + i, load_lanes(x + first + i, lanes) * factor, lanes);
          });
        }
      }
    });
  });
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
