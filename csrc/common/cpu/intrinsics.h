// One wrapper per CPU instruction that the compiler's vector extension cannot express; no other file of the CPU kernels
// uses intrinsics. Intel's Software Developer's Manual, volume 2, defines them. tests/emulation has the same functions
// in plain C++, so that the AVX-512 kernels are tested on machines without it.
//
// FASTINFER_AVX2, FASTINFER_AVX512_VNNI and FASTINFER_AVX512_BF16 say which of them exist; each includes those before
// it.
#pragma once

#include "common/cpu/vector_types.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define FASTINFER_AVX2
#define FASTINFER_VECTOR_SHUFFLES  // __builtin_shuffle of whole vectors compiles to instructions, not to scalar moves
#include <immintrin.h>
#endif
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__) && \
    defined(__AVX512VNNI__)
#define FASTINFER_AVX512_VNNI
#endif
#if defined(FASTINFER_AVX512_VNNI) && defined(__AVX512BF16__)
#define FASTINFER_AVX512_BF16
#endif

namespace fastinfer::cpu::FASTINFER_ISA {

// No instruction: `v` itself, held in a register. GCC 12 would load a vector from memory anew for each of its uses.
template <class V>
FASTINFER_INLINE V in_register(V v) {
#if defined(FASTINFER_AVX512_VNNI)
  asm("" : "+v"(v));
#elif defined(FASTINFER_AVX2)
  asm("" : "+x"(v));
#endif
  return v;
}

#if defined(FASTINFER_AVX2)

// vcvtph2ps: exact.
FASTINFER_INLINE f32x8 half_to_float(u16x8 v) {
  return (f32x8)_mm256_cvtph_ps((__m128i)v);
}

// vcvtps2ph: to nearest, ties to even; beyond 65,504 to infinity.
FASTINFER_INLINE u16x8 float_to_half(f32x8 v) {
  return (u16x8)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

// vpmovzxwd. The vector extension has the conversion, but GCC 12 makes five instructions of it.
FASTINFER_INLINE u32x8 widen(u16x8 v) {
  return (u32x8)_mm256_cvtepu16_epi32((__m128i)v);
}

// vpmovsxbd. GCC 12 takes the bytes out one by one for the extension's conversion.
FASTINFER_INLINE i32x8 widen(i8x8 v) {
  return (i32x8)_mm256_cvtepi8_epi32((__m128i)(i64x2){(int64_t)v, 0});
}

// vpmaddubsw: neighbouring products a[2i] b[2i] + a[2i+1] b[2i+1], saturated to 16 bits.
FASTINFER_INLINE i16x16 maddubs(u8x32 a, i8x32 b) {
  return (i16x16)_mm256_maddubs_epi16((__m256i)a, (__m256i)b);
}

// vpmaddwd: neighbouring products a[2i] b[2i] + a[2i+1] b[2i+1]; only four times -32,768 overflows, to -2^31.
FASTINFER_INLINE i32x8 madd(i16x16 a, i16x16 b) {
  return (i32x8)_mm256_madd_epi16((__m256i)a, (__m256i)b);
}

// vpsignb: a, 0 or -a as b is positive, zero or negative; -(-128) is -128.
FASTINFER_INLINE i8x32 sign(i8x32 a, i8x32 b) {
  return (i8x32)_mm256_sign_epi8((__m256i)a, (__m256i)b);
}

// vpshufb: in each 16 bytes, v[index % 16], or 0 where the index is 128 or more.
FASTINFER_INLINE u8x32 shuffle_bytes(u8x32 v, u8x32 index) {
  return (u8x32)_mm256_shuffle_epi8((__m256i)v, (__m256i)index);
}

// vmaxps, vminps: a > b ? a : b and a < b ? a : b. GCC 12 makes two instructions of these where one is a constant.
FASTINFER_INLINE f32x8 max(f32x8 a, f32x8 b) {
  return (f32x8)_mm256_max_ps((__m256)a, (__m256)b);
}

FASTINFER_INLINE f32x8 min(f32x8 a, f32x8 b) {
  return (f32x8)_mm256_min_ps((__m256)a, (__m256)b);
}

// vfmadd: a b + c, rounded once: for what must not be rounded in between.
FASTINFER_INLINE f32x8 fused_multiply_add(f32x8 a, f32x8 b, f32x8 c) {
  return (f32x8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}

#endif

#if defined(FASTINFER_AVX512_VNNI)

FASTINFER_INLINE f32x16 max(f32x16 a, f32x16 b) {
  return (f32x16)_mm512_max_ps((__m512)a, (__m512)b);
}

FASTINFER_INLINE f32x16 min(f32x16 a, f32x16 b) {
  return (f32x16)_mm512_min_ps((__m512)a, (__m512)b);
}

FASTINFER_INLINE f32x16 half_to_float(u16x16 v) {
  return (f32x16)_mm512_cvtph_ps((__m256i)v);
}

FASTINFER_INLINE u16x16 float_to_half(f32x16 v) {
  return (u16x16)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

FASTINFER_INLINE u32x16 widen(u16x16 v) {
  return (u32x16)_mm512_cvtepu16_epi32((__m256i)v);
}

FASTINFER_INLINE i32x16 widen(i8x16 v) {
  return (i32x16)_mm512_cvtepi8_epi32((__m128i)v);
}

FASTINFER_INLINE u8x64 shuffle_bytes(u8x64 v, u8x64 index) {
  return (u8x64)_mm512_shuffle_epi8((__m512i)v, (__m512i)index);
}

// vpdpbusd: sum[i] + a[4i] b[4i] + ... + a[4i+3] b[4i+3] modulo 2^32; nothing saturates on the way.
FASTINFER_INLINE i32x16 dpbusd(i32x16 sum, u8x64 a, i8x64 b) {
  return (i32x16)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
}

// vpdpbusd with the four bytes at b for every lane. GCC 12 would load them into a register with an instruction of its
// own.
FASTINFER_INLINE i32x16 dpbusd(i32x16 sum, u8x64 a, const int8_t* b) {
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(a), "m"(*(const int8_t (*)[4])b));
  return sum;
}

FASTINFER_INLINE f32x16 fused_multiply_add(f32x16 a, f32x16 b, f32x16 c) {
  return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}

#endif

#if defined(FASTINFER_AVX512_BF16)

// vdpbf16ps, of bf16 in 16-bit lanes: sum[i] + a[2i+1] b[2i+1], rounded to nearest, then + a[2i] b[2i], rounded again
// (each a fused multiply-add). Denormals count as zero, in the arguments and in the results, whatever MXCSR says.
FASTINFER_INLINE f32x8 dpbf16(f32x8 sum, u16x16 a, u16x16 b) {
  return (f32x8)_mm256_dpbf16_ps((__m256)sum, (__m256bh)a, (__m256bh)b);
}

FASTINFER_INLINE f32x16 dpbf16(f32x16 sum, u16x32 a, u16x32 b) {
  return (f32x16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}

// vcvtne2ps2bf16: to nearest, ties to even, `low` first. Denormals count as zero, NaNs become quiet.
FASTINFER_INLINE u16x32 float_to_bf16(f32x16 low, f32x16 high) {
  return (u16x32)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
}

#endif

}  // namespace fastinfer::cpu::FASTINFER_ISA
