#include "attention/merge_attention_states.h"

#include "common/cpu/parallel.h"
#include "common/cpu/vec.h"

namespace fastinfer::cpu::FASTINFER_ISA {

void merge_attention_states(const MergeAttentionStatesParams& p) {
  dispatch(p.dtype, [&]<class T>(T) {
    parallel_for(p.rows, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const MergedState state = merge_states(p.a_lse[row], p.b_lse[row]);
        const T* a = static_cast<const T*>(p.a) + row * p.columns;
        const T* b = static_cast<const T*>(p.b) + row * p.columns;
        T* out = static_cast<T*>(p.out) + row * p.columns;
        for_each_vector(p.columns, [&](int64_t i, int64_t lanes) {
          f32v sum{};  // a state that counts nothing adds nothing, whatever it holds
          if (state.a != 0.0f) sum += load_lanes(a + i, lanes) * state.a;
          if (state.b != 0.0f) sum += load_lanes(b + i, lanes) * state.b;
          store_lanes(out + i, sum, lanes);
        });
        p.out_lse[row] = state.lse;
      }
    });
  });
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
