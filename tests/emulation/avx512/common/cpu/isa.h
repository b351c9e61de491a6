// csrc/common/cpu/isa.h for the emulated AVX-512: there is one instruction set, and nothing to choose.
#pragma once

#define FASTINFER_CPU_KERNEL(fn, Params) \
  namespace fastinfer::cpu {             \
  namespace FASTINFER_ISA {              \
  void fn(const Params&);                \
  }                                      \
  inline void fn(const Params& params) { \
    return FASTINFER_ISA::fn(params);    \
  }                                      \
  }
#define FASTINFER_CPU_KERNEL_BF16(fn, Params) FASTINFER_CPU_KERNEL(fn, Params)
#define FASTINFER_CPU_KERNEL_TILES(fn, Params) FASTINFER_CPU_KERNEL(fn, Params)
#define FASTINFER_CPU_KERNEL_BF16_PROMPTS(fn, Params) FASTINFER_CPU_KERNEL(fn, Params)
#define FASTINFER_CPU_KERNEL_BF16_TILES(fn, Params) FASTINFER_CPU_KERNEL(fn, Params)
