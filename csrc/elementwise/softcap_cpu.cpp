#include "elementwise/softcap.h"

#include <algorithm>

#include "common/cpu/parallel.h"
#include "common/cpu/vec.h"

namespace fastinfer::cpu::FASTINFER_ISA {

void softcap(const SoftcapParams& p) {
  constexpr int64_t kBlock = 1024;  // elements: one token's logits are work for all threads
  dispatch(p.dtype, [&]<class T>(T) {
    parallel_for((p.count + kBlock - 1) / kBlock, [&](int64_t begin, int64_t end) {
      T* x = static_cast<T*>(p.x) + begin * kBlock;
      for_each_vector(std::min(p.count, end * kBlock) - begin * kBlock, [&](int64_t i, int64_t lanes) {
        // tanh(u) = 1 - 2 / (exp(2 u) + 1)
        const f32v exp_2u = exp(load_lanes(x + i, lanes) * (2.0f / p.cap));
        store_lanes(x + i, p.cap * (1.0f - 2.0f / (exp_2u + 1.0f)), lanes);
      });
    });
  });
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
