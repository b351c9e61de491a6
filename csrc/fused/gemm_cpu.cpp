// Dense weights stay as they are, row-major: each output is a dot product along the inputs.
#include "fused/gemm_cpu.h"

namespace fastinfer::cpu::FASTINFER_ISA {
namespace {

template <class W>
struct DenseKernel {
  static constexpr int kMaxRows = 4;

  const DenseGemmParams& p;
  FloatRows x;

  template <int kRows>
  void tile(int64_t tile, int64_t row, float* sums, int stride) const {
    constexpr int kColumns = kRows == 1 ? 4 : 2;  // at most 8 sums and 6 operands: AVX2 has 16 registers
    for (int column = 0; column < kTileRows; column += kColumns) {
      dots<kRows, kColumns>(tile * kTileRows + column, row, sums + column, stride);
    }
  }

  template <int kRows, int kColumns>
  void dots(int64_t n0, int64_t row, float* sums, int stride) const {
    const W* weight[kColumns];
    for (int c = 0; c < kColumns; ++c) {
      weight[c] = static_cast<const W*>(p.weight) + std::min(n0 + c, p.n - 1) * p.k;  // past the end: a row again
    }
    f32v acc[kRows][kColumns] = {};
    for_each_vector(p.k, [&](int64_t i, int64_t lanes) {
      f32v w[kColumns];
      for (int c = 0; c < kColumns; ++c) w[c] = load_lanes(weight[c] + i, lanes);
      for (int r = 0; r < kRows; ++r) {
        const f32v v = load(x.data + (row + r) * x.stride + i);
        for (int c = 0; c < kColumns; ++c) acc[r][c] += w[c] * v;
      }
    });
    for (int r = 0; r < kRows; ++r) {
      for (int c = 0; c < kColumns; ++c) sums[r * stride + c] = reduce_add(acc[r][c]);
    }
  }
};

}  // namespace

void gemm(const DenseGemmParams& p) {
  const FloatRows x = float_rows(p);
  dispatch(p.weight_dtype, [&]<class W>(W) { run_gemm(p, DenseKernel<W>{p, x}); });
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
