// The CPU's instruction sets: which kernels were built, which this machine can run, which one is used.
//
// Every *_cpu.cpp file is compiled once per instruction set, into a namespace of its own (FASTINFER_ISA), so that one
// library runs anywhere. The choice is made once, when the library is loaded; FASTINFER_CPU_ISA overrides it.
#pragma once

#include <string>
#include <vector>

namespace fastinfer::cpu {

enum class Isa { kPortable, kAvx2, kAvx512Vnni };

struct IsaChoice {
  Isa isa;
  std::string reason;
};

const char* name(Isa isa);
std::vector<Isa> built_isas();
std::vector<Isa> usable_isas();           // built, and the machine has all they need; best last
std::vector<std::string> cpu_features();  // those of the machine that matter to the kernels
const IsaChoice& active_isa();            // throws std::runtime_error if FASTINFER_CPU_ISA cannot be honoured

}  // namespace fastinfer::cpu

// Declares `void fn(const Params&)` for every built instruction set, and fastinfer::cpu::fn that calls the active one.
#if defined(__x86_64__)
#define FASTINFER_CPU_KERNEL(fn, Params)                     \
  namespace fastinfer::cpu {                                 \
  namespace portable {                                       \
  void fn(const Params&);                                    \
  }                                                          \
  namespace avx2 {                                           \
  void fn(const Params&);                                    \
  }                                                          \
  namespace avx512_vnni {                                    \
  void fn(const Params&);                                    \
  }                                                          \
  inline void fn(const Params& params) {                     \
    switch (active_isa().isa) {                              \
      case Isa::kAvx512Vnni: return avx512_vnni::fn(params); \
      case Isa::kAvx2: return avx2::fn(params);              \
      default: return portable::fn(params);                  \
    }                                                        \
  }                                                          \
  }
#else
#define FASTINFER_CPU_KERNEL(fn, Params) \
  namespace fastinfer::cpu {             \
  namespace portable {                   \
  void fn(const Params&);                \
  }                                      \
  inline void fn(const Params& params) { \
    return portable::fn(params);         \
  }                                      \
  }
#endif
