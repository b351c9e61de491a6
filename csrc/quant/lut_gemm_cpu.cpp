// 4-bit weights that are indices into 16 numbers: int4_gemm's layout. Products in integers need tables of integers,
// which are looked up as bytes (vpshufb) and then multiplied like weights of 8 bits.
#include <algorithm>
#include <cmath>

#include "quant/int4_format_cpu.h"

namespace fastinfer::cpu::FASTINFER_ISA {
namespace {

struct LutFormat : Int4Format {
  // The bits above an index may be anything.
  template <class Fn>
  FASTINFER_INLINE static void for_each_input(const uint8_t* weight, Fn&& fn) {
    for (int s = 0; s < kSteps; ++s) {
      const i32v packed = load_as<i32v>(weight + s * kTileRows * 4);
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) fn(8 * s + i, packed >> (8 * (i % 4) + 4 * (i / 4)));
    }
  }
};

struct TableValues {
  const float* table;

  FASTINFER_INLINE f32v operator()(i32v q, f32v scale, f32v) const {
    return look_up(q) * scale;
  }

  // Shuffles use the lowest bits of an index alone.
  FASTINFER_INLINE f32v look_up(i32v q) const {
    if constexpr (kLanes == 16) {
      return __builtin_shuffle(load(table), q);
    } else {
      return __builtin_shuffle(load(table), load(table + kLanes), q);
    }
  }
};

#if !defined(FASTINFER_TILES)

// The table as bytes, once for each 16 bytes of a vector.
u8v table_bytes(const float* table, int offset) {
  u8v bytes;
  for (size_t i = 0; i < sizeof(bytes); ++i) bytes[i] = static_cast<uint8_t>(static_cast<int>(table[i % 16]) + offset);
  return bytes;
}

FASTINFER_INLINE RunBytes look_up(u8v table, RunBytes run) {
#pragma GCC unroll 4
  for (u8v& step : run.step) step = shuffle_bytes(table, step);
  return run;
}

#if defined(FASTINFER_AVX512_VNNI)

// Integers -128..127.
struct IntegerTable : Int4Format {
  static constexpr float kSymmetricOffset = 0.0f;
  static constexpr float kUnsignedOffset = 128.0f;
  u8v bytes;

  explicit IntegerTable(const float* table) : bytes(table_bytes(table, 128)) {}

  FASTINFER_INLINE RunBytes load_unsigned(const uint8_t* block, int run) const {
    return look_up(bytes, load_run(block, run));
  }
};

#else

// Integers -128..127.
struct IntegerTable : Int4Format {
  static constexpr float kSymmetricOffset = 0.0f;
  static constexpr int kVectors = 1;  // as with 8 bits
  u8v bytes;

  explicit IntegerTable(const float* table) : bytes(table_bytes(table, 0)) {}

  template <int kBits>
  using Run = WideRun<kBits>;

  template <int kBits>
  FASTINFER_INLINE Run<kBits> load(const uint8_t* block, int run) const {
    return Run<kBits>::of_signed(look_up(bytes, load_run(block, run)));
  }
};

// Integers -16..16, as MXFP4 and NVFP4 have, need no widening where the activations have 8 bits: see PairRun.
struct SmallIntegerTable : Int4Format {
  static constexpr int kMost = 16;
  static constexpr float kSymmetricOffset = kMost;
  u8v bytes;

  explicit SmallIntegerTable(const float* table) : bytes(table_bytes(table, kMost)) {}

  template <int kBits>
  using Run = PairRun;

  template <int kBits>
  FASTINFER_INLINE Run<kBits> load(const uint8_t* block, int run) const {
    static_assert(kBits == 8);
    return {look_up(bytes, load_run(block, run))};
  }

  static bool holds(const float* table) {
    return std::all_of(table, table + 16, [](float entry) { return std::abs(entry) <= kMost; });
  }
};

#endif

template <class Scale>
void run_lut_gemm(const LutGemmParams& p) {
  switch (p.activation_bits) {
    case 8:
#if !defined(FASTINFER_AVX512_VNNI)
      if (SmallIntegerTable::holds(p.table)) {
        return run_integer_gemm<SmallIntegerTable, Scale, 8>(p, SmallIntegerTable(p.table));
      }
#endif
      return run_integer_gemm<IntegerTable, Scale, 8>(p, IntegerTable(p.table));
    case 16: return run_integer_gemm<IntegerTable, Scale, 16>(p, IntegerTable(p.table));
    default: return run_gemm(p, FloatKernel<LutFormat, Scale, TableValues>{p, float_rows(p), {p.table}});
  }
}

#endif

}  // namespace

void lut_gemm(const LutGemmParams& p) {
#if defined(FASTINFER_TILES)
  const auto run = [&]<class Scale>(Scale) {
    run_tile_gemm(p, PackedTiles<LutFormat, Scale, TableValues>{p, {p.table}});
  };
#else
  const auto run = [&]<class Scale>(Scale) { run_lut_gemm<Scale>(p); };
#endif
  p.weight.scale_dtype == DType::kFloat16 ? run(Float16{}) : run(float{});
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
