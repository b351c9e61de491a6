#include "quant/w8a8_gemm.h"

#include <stdexcept>

#include "common/cpu/dot.h"
#include "fused/gemm_cpu.h"

namespace fastinfer::cpu::FASTINFER_ISA {
namespace {

// Lanes are weight rows. Sums are int32, and so the same in every order.
struct W8a8Kernel {
  static constexpr int kMaxRows = 4;
  static constexpr int kSteps = kBlockInputs / 4, kStepBytes = kTileRows * 4;

  const W8a8GemmParams& p;
  const int32_t* totals;  // [m], of the rows of x

  template <int kRows>
  void tile(int64_t tile, int64_t row, float* out, int stride) const {
    const int64_t steps = p.k / 4;
    const auto* x = static_cast<const int8_t*>(p.x) + row * p.k;
    for (int half = 0; half < kHalves; ++half) {
      const auto* weight = static_cast<const int8_t*>(p.weight.q) + tile * steps * kStepBytes + half * kLanes * 4;
      Int8Dot sums[kRows];
      for (int64_t s = 0; s < steps; ++s) {
        const i8v w = load_as<i8v>(weight + s * kStepBytes);
        for (int r = 0; r < kRows; ++r) sums[r].add(w, broadcast4(x + r * p.k + 4 * s));
      }
      const f32v scale = scales(tile * kTileRows + half * kLanes);
      for (int r = 0; r < kRows; ++r) {
        store(out + r * stride + half * kLanes, to_f32(sums[r].sum(totals[row + r])) * scale * p.x_scales[row + r]);
      }
    }
  }

  FASTINFER_INLINE f32v scales(int64_t row) const {
    if (p.weight.scale_dtype == DType::kFloat16) return load(static_cast<const Float16*>(p.weight.scales) + row);
    return load(static_cast<const float*>(p.weight.scales) + row);
  }
};

}  // namespace

void w8a8_gemm(const W8a8GemmParams& p) {
  int32_t* totals = scratch_array<int32_t>(kScales, p.m);
  parallel_for(p.m, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const auto* x = static_cast<const int8_t*>(p.x) + row * p.k;
      int32_t total = 0;
      bool fits = true;
      for (int64_t i = 0; i < p.k; ++i) {
        total += x[i];
        fits = fits && x[i] != -128;
      }
      // The byte products of some instruction sets know no -(-128).
      if (!fits) throw std::runtime_error("w8a8_gemm: x must be -127..127 throughout");
      totals[row] = total;
    }
  });
  run_gemm(p, W8a8Kernel{p, totals});
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
