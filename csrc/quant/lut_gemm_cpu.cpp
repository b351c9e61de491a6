// 4-bit weights that are indices into 16 numbers: int4_gemm's layout, fp32 products.
#include "quant/int4_format_cpu.h"

namespace fastinfer::cpu::FASTINFER_ISA {
namespace {

struct TableValues {
  const float* table;

  FASTINFER_INLINE f32v operator()(i32v q, f32v scale, f32v) const {
    return look_up(q) * scale;
  }

  FASTINFER_INLINE f32v look_up(i32v q) const {
    if constexpr (kLanes == 16) {
      return __builtin_shuffle(load(table), q);
    } else {
      return __builtin_shuffle(load(table), load(table + kLanes), q);
    }
  }
};

}  // namespace

void lut_gemm(const LutGemmParams& p) {
#if defined(FASTINFER_TILES)
  const auto run = [&]<class Scale>(Scale) {
    run_tile_gemm(p, PackedTiles<Int4Format, Scale, TableValues>{p, {p.table}});
  };
#else
  const FloatRows x = float_rows(p);
  const auto run = [&]<class Scale>(Scale) {
    run_gemm(p, FloatKernel<Int4Format, Scale, TableValues>{p, x, {p.table}});
  };
#endif
  p.weight.scale_dtype == DType::kFloat16 ? run(Float16{}) : run(float{});
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
