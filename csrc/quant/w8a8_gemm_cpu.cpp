#include "quant/w8a8_gemm.h"

#include <stdexcept>

#include "common/cpu/dot.h"
#include "gemm/gemm_cpu.h"

namespace fastinfer::cpu::FASTINFER_ISA {
namespace {

// sum + w x + kSumOffset x, over four neighbours; w in -128..127, x in -127..127.
#if defined(FASTINFER_AVX512_VNNI)
constexpr int kSumOffset = 128;
FASTINFER_INLINE i32v multiply_add(i32v sum, i8v w, i8v x) {
  return dpbusd(sum, (u8v)w ^ 0x80, x);  // wants unsigned weights: w + 128
}
#else
constexpr int kSumOffset = 0;
#if !defined(FASTINFER_AVX2)
FASTINFER_INLINE i8v sign(i8v a, i8v b) {
  return b < 0 ? -a : (b == 0 ? i8v{} : a);
}
#endif
FASTINFER_INLINE i32v multiply_add(i32v sum, i8v w, i8v x) {
  // |w| times x with w's sign: a pair is at most 2 * 128 * 127 = 32,512.
  return sum + madd(maddubs((u8v)sign(w, w), sign(x, w)), i16v{} + 1);
}
#endif

// Lanes are weight rows. Sums are int32, and so the same in every order.
struct W8a8Kernel {
  static constexpr int kMaxRows = kLanes == 16 ? 8 : 4;  // there are 32 or 16 registers
  static constexpr int kSteps = kBlockInputs / 4, kStepBytes = kTileRows * 4;

  const W8a8GemmParams& p;
  const int32_t* totals;  // [m], of the rows of x

  template <int kRows>
  void tile(int64_t tile, int64_t row, float* out, int stride) const {
    const int64_t steps = p.k / 4;
    const auto* x = static_cast<const int8_t*>(p.x) + row * p.k;
    for (int half = 0; half < kHalves; ++half) {
      const auto* weight = static_cast<const int8_t*>(p.weight.q) + tile * steps * kStepBytes + half * kLanes * 4;
      i32v sums[kRows] = {};
      for (int64_t s = 0; s < steps; ++s) {
        const i8v w = load_as<i8v>(weight + s * kStepBytes);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) sums[r] = multiply_add(sums[r], w, (i8v)broadcast_word(x + r * p.k + 4 * s));
      }
      const f32v scale = scales(tile * kTileRows + half * kLanes);
      for (int r = 0; r < kRows; ++r) {
        const i32v sum = sums[r] - kSumOffset * totals[row + r];
        store(out + r * stride + half * kLanes, to_f32(sum) * scale * p.x_scales[row + r]);
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
