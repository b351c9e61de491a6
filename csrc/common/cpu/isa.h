// The CPU's instruction sets: which kernels were built, which this machine can run, which one is used.
//
// Every *_cpu.cpp file is compiled once per instruction set, into a namespace of its own (FASTINFER_ISA), so that one
// library runs anywhere. The choice is made once, when the library is loaded. FASTINFER_CPU_ISA overrides it: it names
// the best instruction set that counts as usable, so that a machine can stand in for an older one.
#pragma once

#include <string>
#include <vector>

#include "common/api.h"

namespace fastinfer::cpu {

enum class Isa { kPortable, kAvx2, kAvx512Vnni, kAvx512Bf16 };

struct IsaChoice {
  Isa isa;
  std::string reason;
};

FASTINFER_API const char* name(Isa isa);
FASTINFER_API std::vector<Isa> built_isas();
FASTINFER_API std::vector<Isa> usable_isas();           // built, supported, none above FASTINFER_CPU_ISA; best last
FASTINFER_API std::vector<std::string> cpu_features();  // features of this machine that the kernels use
FASTINFER_API const IsaChoice& active_isa();            // std::runtime_error where FASTINFER_CPU_ISA cannot be had

}  // namespace fastinfer::cpu

// FASTINFER_CPU_KERNEL(fn, Params): declares `void fn(const Params&)` for every built instruction set, and
// fastinfer::cpu::fn that calls the active one. FASTINFER_CPU_KERNEL_BF16: the same for a kernel that is also compiled
// for AVX-512 BF16, because it uses its instruction; the others run there as compiled for AVX-512 VNNI.
#define FASTINFER_DECLARE_KERNEL(isa, fn, Params) \
  namespace fastinfer::cpu::isa {                 \
  FASTINFER_API void fn(const Params&);           \
  }

#if defined(__x86_64__)
#define FASTINFER_DISPATCH_KERNEL(fn, Params, bf16_isa)      \
  FASTINFER_DECLARE_KERNEL(portable, fn, Params)             \
  FASTINFER_DECLARE_KERNEL(avx2, fn, Params)                 \
  FASTINFER_DECLARE_KERNEL(avx512_vnni, fn, Params)          \
  namespace fastinfer::cpu {                                 \
  inline void fn(const Params& params) {                     \
    switch (active_isa().isa) {                              \
      case Isa::kAvx512Bf16: return bf16_isa::fn(params);    \
      case Isa::kAvx512Vnni: return avx512_vnni::fn(params); \
      case Isa::kAvx2: return avx2::fn(params);              \
      default: return portable::fn(params);                  \
    }                                                        \
  }                                                          \
  }
#define FASTINFER_CPU_KERNEL(fn, Params) FASTINFER_DISPATCH_KERNEL(fn, Params, avx512_vnni)
#define FASTINFER_CPU_KERNEL_BF16(fn, Params)       \
  FASTINFER_DECLARE_KERNEL(avx512_bf16, fn, Params) \
  FASTINFER_DISPATCH_KERNEL(fn, Params, avx512_bf16)
#else
#define FASTINFER_CPU_KERNEL(fn, Params)         \
  FASTINFER_DECLARE_KERNEL(portable, fn, Params) \
  namespace fastinfer::cpu {                     \
  inline void fn(const Params& params) {         \
    return portable::fn(params);                 \
  }                                              \
  }
#define FASTINFER_CPU_KERNEL_BF16(fn, Params) FASTINFER_CPU_KERNEL(fn, Params)
#endif
