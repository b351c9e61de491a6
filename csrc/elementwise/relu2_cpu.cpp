#include "elementwise/relu2.h"

#include <algorithm>

#include "common/cpu/parallel.h"
#include "common/cpu/vec.h"

namespace fastinfer::cpu::FASTINFER_ISA {

void relu2(const Relu2Params& p) {
  constexpr int64_t kBlock = 1024;  // elements: one token's are work for all threads
  dispatch(p.dtype, [&]<class T>(T) {
    parallel_for((p.count + kBlock - 1) / kBlock, [&](int64_t begin, int64_t end) {
      const T* x = static_cast<const T*>(p.x) + begin * kBlock;
      T* out = static_cast<T*>(p.out) + begin * kBlock;
      for_each_vector(std::min(p.count, end * kBlock) - begin * kBlock, [&](int64_t i, int64_t lanes) {
        const f32v v = load_lanes(x + i, lanes), zero = broadcast(0.0f);
        store_lanes(out + i, select(v < zero, zero, v * v), lanes);  // NaN stays
      });
    });
  });
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
