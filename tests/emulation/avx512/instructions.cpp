// The wrappers of common/cpu/intrinsics.h as one C function: compiled with the emulated header, and with the real one
// for every instruction set that the machine has.
#include "common/cpu/intrinsics.h"

#include <cstdint>
#include <cstring>
#include <string_view>

namespace fastinfer::cpu::FASTINFER_ISA {
namespace {

template <class V>
V load_at(const char* p, int64_t i) {
  V v;
  std::memcpy(&v, p + i * sizeof(V), sizeof(V));
  return v;
}

}  // namespace

// Applies an instruction to `count` vectors; false where this build does not have it.
extern "C" __attribute__((visibility("default"))) bool run_instruction(const char* wanted, const char* a, const char* b,
                                                                       const char* sum, char* out, int64_t count) {
  const std::string_view name = wanted;
#define A(V) load_at<V>(a, i)
#define B(V) load_at<V>(b, i)
#define SUM(V) load_at<V>(sum, i)
#define INSTRUCTION(text, ...)                         \
  if (name == text) {                                  \
    for (int64_t i = 0; i < count; ++i) {              \
      const auto v = __VA_ARGS__;                      \
      std::memcpy(out + i * sizeof(v), &v, sizeof(v)); \
    }                                                  \
    return true;                                       \
  }
#if defined(FASTINFER_AVX2)
  INSTRUCTION("max 256", max(A(f32x8), B(f32x8)))
  INSTRUCTION("min 256", min(A(f32x8), B(f32x8)))
  INSTRUCTION("half_to_float 256", half_to_float(A(u16x8)))
  INSTRUCTION("float_to_half 256", float_to_half(A(f32x8)))
  INSTRUCTION("widen 256", widen(A(u16x8)))
  INSTRUCTION("widen bytes 256", widen(A(i8x8)))
  INSTRUCTION("maddubs 256", maddubs(A(u8x32), B(i8x32)))
  INSTRUCTION("madd 256", madd(A(i16x16), B(i16x16)))
  INSTRUCTION("sign 256", sign(A(i8x32), B(i8x32)))
  INSTRUCTION("shuffle_bytes 256", shuffle_bytes(A(u8x32), B(u8x32)))
  INSTRUCTION("fused_multiply_add 256", fused_multiply_add(A(f32x8), B(f32x8), SUM(f32x8)))
#endif
#if defined(FASTINFER_AVX512_VNNI)
  INSTRUCTION("max 512", max(A(f32x16), B(f32x16)))
  INSTRUCTION("min 512", min(A(f32x16), B(f32x16)))
  INSTRUCTION("half_to_float 512", half_to_float(A(u16x16)))
  INSTRUCTION("float_to_half 512", float_to_half(A(f32x16)))
  INSTRUCTION("widen 512", widen(A(u16x16)))
  INSTRUCTION("widen bytes 512", widen(A(i8x16)))
  INSTRUCTION("shuffle_bytes 512", shuffle_bytes(A(u8x64), B(u8x64)))
  INSTRUCTION("dpbusd 512", dpbusd(SUM(i32x16), A(u8x64), B(i8x64)))
  INSTRUCTION("dpbusd broadcast 512", dpbusd(SUM(i32x16), A(u8x64), reinterpret_cast<const int8_t*>(b + 4 * i)))
  INSTRUCTION("fused_multiply_add 512", fused_multiply_add(A(f32x16), B(f32x16), SUM(f32x16)))
#endif
#if defined(FASTINFER_AVX512_BF16)
  INSTRUCTION("dpbf16 256", dpbf16(SUM(f32x8), A(u16x16), B(u16x16)))
  INSTRUCTION("dpbf16 512", dpbf16(SUM(f32x16), A(u16x32), B(u16x32)))
  INSTRUCTION("float_to_bf16 512", float_to_bf16(A(f32x16), B(f32x16)))
#endif
  return false;
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
