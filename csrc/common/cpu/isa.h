// The CPU's instruction sets: which kernels were built, which this machine can run, which one is used.
//
// Every *_cpu.cpp file is compiled once per instruction set, into a namespace of its own (FASTINFER_ISA), so that one
// library runs anywhere. The choice is made once, when the library is loaded. FASTINFER_CPU_ISA overrides it: it names
// the best instruction set that counts as usable, so that a machine can stand in for an older one.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/api.h"

namespace fastinfer::cpu {

// kAmx: AVX-512 BF16 with tiles for the rows of prompts. kAmxEmulated: the same kernels on tiles in software, for
// tests, used only where FASTINFER_CPU_ISA names it.
enum class Isa { kPortable, kAvx2, kAvx512Vnni, kAvx512Bf16, kAmx, kAmxEmulated };

struct IsaChoice {
  Isa isa;
  std::string reason;
  Isa vectors;  // whose kernels compute all but rows of prompts: `isa` itself, or the best below the tiles
};

FASTINFER_API const char* name(Isa isa);
FASTINFER_API std::vector<Isa> built_isas();
FASTINFER_API std::vector<Isa> usable_isas();           // built, supported, none above FASTINFER_CPU_ISA; best last
FASTINFER_API std::vector<std::string> cpu_features();  // features of this machine that the kernels use
FASTINFER_API const IsaChoice& active_isa();            // std::runtime_error where FASTINFER_CPU_ISA cannot be had

// Both get the same parameters; afterwards `before` has the rows before the first of a prompt, and `prompt` the others.
template <class Params>
void part_rows(Params& before, Params& prompt) {
  if constexpr (requires { before.expert_rows; }) {
    if (before.expert_rows.start != nullptr) {
      part_expert_rows(before.first_prompt_row, before.expert_rows, prompt.expert_rows);
      before.m = before.expert_rows.start[before.expert_rows.experts];
      prompt.m = prompt.expert_rows.start[prompt.expert_rows.experts];
      prompt.first_prompt_row = 0;
      return;
    }
  }
  before.m = before.first_prompt_row;
}

template <class Params>
using Kernel = void (*)(const Params&);

// The kernel for rows of prompts, of the active instruction set; null where they are computed as all others.
template <class Params>
Kernel<Params> prompt_kernel(Kernel<Params> avx512_bf16, Kernel<Params> amx, Kernel<Params> amx_emulated) {
  switch (active_isa().isa) {
    case Isa::kAvx512Bf16: return avx512_bf16;
    case Isa::kAmx: return amx;
    case Isa::kAmxEmulated: return amx_emulated;
    default: return nullptr;
  }
}

// Computes the rows before the first of a prompt with `vectors`, and the others with `prompts`, if it is not null.
template <class Params>
void run_by_role(const Params& params, Kernel<Params> vectors, Kernel<Params> prompts) {
  if (prompts == nullptr || params.first_prompt_row >= params.m) return vectors(params);
  Params before = params, rows = params;
  part_rows(before, rows);
  if (before.m > 0) vectors(before);
  if (rows.first_prompt_row < rows.m) prompts(rows);
}

}  // namespace fastinfer::cpu

// FASTINFER_CPU_KERNEL(fn, Params): declares `void fn(const Params&)` for every built instruction set, and
// fastinfer::cpu::fn that calls the active one. FASTINFER_CPU_KERNEL_BF16: the same for a kernel that is also compiled
// for AVX-512 BF16, because it uses its instruction; the others run there as compiled for AVX-512 VNNI.
#define FASTINFER_DECLARE_KERNEL(isa, fn, Params) \
  namespace fastinfer::cpu::isa {                 \
  FASTINFER_API void fn(const Params&);           \
  }

#if defined(__x86_64__)
#define FASTINFER_DISPATCH_KERNEL(dispatcher, fn, Params, bf16_isa) \
  FASTINFER_DECLARE_KERNEL(portable, fn, Params)                    \
  FASTINFER_DECLARE_KERNEL(avx2, fn, Params)                        \
  FASTINFER_DECLARE_KERNEL(avx512_vnni, fn, Params)                 \
  namespace fastinfer::cpu {                                        \
  inline void dispatcher(const Params& params) {                    \
    switch (active_isa().vectors) {                                 \
      case Isa::kAvx512Bf16: return bf16_isa::fn(params);           \
      case Isa::kAvx512Vnni: return avx512_vnni::fn(params);        \
      case Isa::kAvx2: return avx2::fn(params);                     \
      default: return portable::fn(params);                         \
    }                                                               \
  }                                                                 \
  }
#define FASTINFER_CPU_KERNEL(fn, Params) FASTINFER_DISPATCH_KERNEL(fn, fn, Params, avx512_vnni)
#define FASTINFER_CPU_KERNEL_BF16(fn, Params)       \
  FASTINFER_DECLARE_KERNEL(avx512_bf16, fn, Params) \
  FASTINFER_DISPATCH_KERNEL(fn, fn, Params, avx512_bf16)
// FASTINFER_CPU_KERNEL_TILES and FASTINFER_CPU_KERNEL_BF16_TILES: the same for a kernel whose rows from
// params.first_prompt_row on are computed in tiles where there are any, and the rows before as without. Rows of
// experts, which come in another order, are parted first (ExpertRows in gemm/gemm.h).
// FASTINFER_CPU_KERNEL_BF16_PROMPTS: the same for a kernel that is also compiled for AVX-512 BF16, for these rows
// alone.
#define FASTINFER_DISPATCH_TILES(fn, Params, bf16_isa, bf16_prompts)                                              \
  FASTINFER_DECLARE_KERNEL(amx, fn, Params)                                                                       \
  FASTINFER_DECLARE_KERNEL(amx_emulated, fn, Params)                                                              \
  FASTINFER_DISPATCH_KERNEL(fn##_in_vectors, fn, Params, bf16_isa)                                                \
  namespace fastinfer::cpu {                                                                                      \
  inline void fn(const Params& params) {                                                                          \
    run_by_role<Params>(params, fn##_in_vectors, prompt_kernel<Params>(bf16_prompts, amx::fn, amx_emulated::fn)); \
  }                                                                                                               \
  }
#define FASTINFER_CPU_KERNEL_TILES(fn, Params) FASTINFER_DISPATCH_TILES(fn, Params, avx512_vnni, nullptr)
#define FASTINFER_CPU_KERNEL_BF16_TILES(fn, Params) \
  FASTINFER_DECLARE_KERNEL(avx512_bf16, fn, Params) \
  FASTINFER_DISPATCH_TILES(fn, Params, avx512_bf16, nullptr)
#define FASTINFER_CPU_KERNEL_BF16_PROMPTS(fn, Params) \
  FASTINFER_DECLARE_KERNEL(avx512_bf16, fn, Params)   \
  FASTINFER_DISPATCH_TILES(fn, Params, avx512_vnni, avx512_bf16::fn)
// FASTINFER_CPU_KERNEL_AMX: as FASTINFER_CPU_KERNEL_BF16, for a kernel that is also compiled for AMX, but not for the
// tiles in software.
#define FASTINFER_CPU_KERNEL_AMX(fn, Params)                                   \
  FASTINFER_DECLARE_KERNEL(avx512_bf16, fn, Params)                            \
  FASTINFER_DECLARE_KERNEL(amx, fn, Params)                                    \
  FASTINFER_DISPATCH_KERNEL(fn##_in_vectors, fn, Params, avx512_bf16)          \
  namespace fastinfer::cpu {                                                   \
  inline void fn(const Params& params) {                                       \
    active_isa().isa == Isa::kAmx ? amx::fn(params) : fn##_in_vectors(params); \
  }                                                                            \
  }
#else
#define FASTINFER_CPU_KERNEL(fn, Params)         \
  FASTINFER_DECLARE_KERNEL(portable, fn, Params) \
  namespace fastinfer::cpu {                     \
  inline void fn(const Params& params) {         \
    return portable::fn(params);                 \
  }                                              \
  }
#define FASTINFER_CPU_KERNEL_BF16(fn, Params) FASTINFER_CPU_KERNEL(fn, Params)
#define FASTINFER_CPU_KERNEL_TILES(fn, Params) FASTINFER_CPU_KERNEL(fn, Params)
#define FASTINFER_CPU_KERNEL_BF16_TILES(fn, Params) FASTINFER_CPU_KERNEL(fn, Params)
#define FASTINFER_CPU_KERNEL_BF16_PROMPTS(fn, Params) FASTINFER_CPU_KERNEL(fn, Params)
#define FASTINFER_CPU_KERNEL_AMX(fn, Params) FASTINFER_CPU_KERNEL(fn, Params)
#endif
