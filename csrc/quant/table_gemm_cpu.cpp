// 4-bit weights that are indices into 16 numbers: int4_gemm's layout, fp32 products.
#include "quant/int4_format_cpu.h"

namespace fastinfer::cpu::FASTINFER_ISA {
namespace {

template <class Scale>
struct TableKernel {
  static constexpr int kMaxRows = 4;

  const TableGemmParams& p;
  FloatRows x;

  template <int kRows>
  void tile(int64_t tile, int64_t row, float* sums, int stride) const {
    for (int half = 0; half < kHalves; ++half) {
      f32v acc[kRows] = {};
      for_each_block<Int4Format, Scale>(p, tile, half, [&](int64_t b, const uint8_t* weight, f32v scale, f32v) {
        const float* first = x.data + row * x.stride + b * kBlockInputs;
        Int4Format::for_each_input(weight, [&](int input, i32v q) {
          const f32v w = look_up(q) * scale;
          for (int r = 0; r < kRows; ++r) acc[r] += w * first[r * x.stride + input];
        });
      });
      for (int r = 0; r < kRows; ++r) store(sums + r * stride + half * kLanes, acc[r]);
    }
  }

  FASTINFER_INLINE f32v look_up(i32v q) const {
    if constexpr (kLanes == 16) {
      return __builtin_shuffle(load(p.table), q);
    } else {
      return __builtin_shuffle(load(p.table), load(p.table + kLanes), q);
    }
  }
};

}  // namespace

void table_gemm(const TableGemmParams& p) {
  const FloatRows x = float_rows(p);
  const auto run = [&]<class Scale>(Scale) { run_gemm(p, TableKernel<Scale>{p, x}); };
  p.weight.scale_dtype == DType::kFloat16 ? run(Float16{}) : run(float{});
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
