#include "elementwise/xielu.h"

#include <algorithm>

#include "common/cpu/parallel.h"
#include "common/cpu/vec.h"

namespace fastinfer::cpu::FASTINFER_ISA {
namespace {

// expm1(x) - x for x <= 0. From -1 on by its series, because the difference of exp(x) and 1 + x would lose all digits
// of small x; the first term left out is 1 / 12! at most.
FASTINFER_INLINE f32v expm1_minus(f32v x) {
  f32v series = broadcast(1.0f / 39916800.0f);
  for (const float term :
       {1.0f / 3628800, 1.0f / 362880, 1.0f / 40320, 1.0f / 5040, 1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f}) {
    series = series * x + term;
  }
  return select(x < -1.0f, exp(x) - 1.0f - x, series * x * x);
}

}  // namespace

void xielu(const XieluParams& p) {
  constexpr int64_t kBlock = 1024;  // elements: one token's are work for all threads
  dispatch(p.dtype, [&]<class T>(T) {
    parallel_for((p.count + kBlock - 1) / kBlock, [&](int64_t begin, int64_t end) {
      const T* x = static_cast<const T*>(p.x) + begin * kBlock;
      T* out = static_cast<T*>(p.out) + begin * kBlock;
      for_each_vector(std::min(p.count, end * kBlock) - begin * kBlock, [&](int64_t i, int64_t lanes) {
        const f32v v = load_lanes(x + i, lanes);
        const f32v bounded = select(v > p.eps, broadcast(p.eps), v);  // NaN stays
        const f32v below = p.negative * (expm1_minus(bounded) + (bounded - v));
        store_lanes(out + i, select(v > 0.0f, p.positive * v * v, below) + p.beta * v, lanes);
      });
    });
  });
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
