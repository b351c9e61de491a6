// How the kernels read a block of unsigned integers that has one scale.
#pragma once

#include <type_traits>

#include "quant/quantized_gemm_cpu.h"

namespace fastinfer::cpu::FASTINFER_ISA {

// The base of a `Format` whose load_run() gives the integers.
template <class Format>
struct UnsignedFormat {
  static constexpr int kScales = 1;

#if defined(FASTINFER_AVX512_VNNI)
  static constexpr float kUnsignedOffset = 0.0f;

  FASTINFER_INLINE static RunBytes load_unsigned(const uint8_t* block, int run) {
    return Format::load_run(block, run);
  }
#else
  static constexpr int kVectors = kHalves;  // read together, to use a broadcast activation twice

  template <int kBits>
  using Run = std::conditional_t<kBits == 8, PairRun, WideRun<kBits> >;

  template <int kBits>
  FASTINFER_INLINE static Run<kBits> load(const uint8_t* block, int run) {
    if constexpr (kBits == 8) {
      return {Format::load_run(block, run)};
    } else {
      return Run<kBits>::of_unsigned(Format::load_run(block, run));
    }
  }
#endif
};

}  // namespace fastinfer::cpu::FASTINFER_ISA
