#include "norm/rms_norm_cpu.h"

#include "common/cpu/parallel.h"
#include "common/cpu/quantize_row.h"
#include "norm/rms_norm.h"

namespace fastinfer::cpu::FASTINFER_ISA {

void rms_norm(const RmsNormParams& p) {
  dispatch(p.dtype, [&]<class T>(T) {
    dispatch(p.weight_dtype, [&]<class W>(W) {
      const auto* weight = static_cast<const W*>(p.weight);
      parallel_for(p.rows, [&](int64_t begin, int64_t end) {
        float* normed = p.scales != nullptr ? scratch_array<float>(0, p.hidden) : nullptr;
        for (int64_t row = begin; row < end; ++row) {
          const int64_t offset = row * p.hidden;
          const T* x = static_cast<const T*>(p.x) + offset;
          if (p.residual != nullptr) {
            T* residual = static_cast<T*>(p.residual) + offset;
            for_each_vector(p.hidden, [&](int64_t i, int64_t lanes) {
              store_lanes(residual + i, load_lanes(residual + i, lanes) + load_lanes(x + i, lanes), lanes);
            });
            x = residual;
          }
          if (p.scales == nullptr) {
            const T* addend = p.addend != nullptr ? static_cast<const T*>(p.addend) + offset : nullptr;
            rms_norm_row(x, weight, p.hidden, p.eps, static_cast<T*>(p.out) + offset, addend, p.factor);
          } else {
            rms_norm_row(x, weight, p.hidden, p.eps, normed);
            p.scales[row] = quantize_row(normed, p.hidden, static_cast<Int8*>(p.out) + offset);
          }
        }
      });
    });
  });
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
