#include "quant/quantize_int8.h"

#include "common/cpu/parallel.h"
#include "common/cpu/quantize_row.h"

namespace fastinfer::cpu::FASTINFER_ISA {

void quantize_int8(const QuantizeInt8Params& p) {
  dispatch(p.dtype, [&]<class T>(T) {
    parallel_for(p.rows, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const T* x = static_cast<const T*>(p.x) + row * p.hidden;
        p.scales[row] = quantize_row(x, p.hidden, reinterpret_cast<Int8*>(p.q) + row * p.hidden);
      }
    });
  });
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
