#include "elementwise/sigmoid_gate.h"

#include "common/cpu/parallel.h"
#include "common/cpu/vec.h"

namespace fastinfer::cpu::FASTINFER_ISA {
namespace {

// log(1 + exp(x)) = max(x, 0) + log(1 + y), y = exp(-|x|), to within 3 ulp. log(1 + y) is 2 artanh(s), where s is
// y / (2 + y) <= 1 / 3, of which the series has eight terms. NaN of NaN.
FASTINFER_INLINE f32v softplus(f32v x) {
  const f32v y = exp(select(x > 0.0f, -x, x)), s = y / (2.0f + y), square = s * s;
  f32v series = broadcast(1.0f / 15.0f);
  for (const float term : {1.0f / 13.0f, 1.0f / 11.0f, 1.0f / 9.0f, 1.0f / 7.0f, 1.0f / 5.0f, 1.0f / 3.0f, 1.0f}) {
    series = series * square + term;
  }
  return max(f32v{}, x) + 2.0f * s * series;
}

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
