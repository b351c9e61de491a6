// Vectors of a fixed number of lanes, in the compiler's generic vector extension: what the instructions' wrappers take.
#pragma once

#include <cstdint>

#ifndef FASTINFER_ISA
#error "compile this file once per instruction set, with FASTINFER_ISA set to the namespace's name"
#endif

#define FASTINFER_INLINE inline __attribute__((always_inline))

namespace fastinfer::cpu::FASTINFER_ISA {

#define FASTINFER_VECTOR(type, name, bytes) typedef type name __attribute__((vector_size(bytes)))
FASTINFER_VECTOR(int8_t, i8x8, 8);

FASTINFER_VECTOR(int8_t, i8x16, 16);
FASTINFER_VECTOR(uint16_t, u16x8, 16);
FASTINFER_VECTOR(int64_t, i64x2, 16);

FASTINFER_VECTOR(float, f32x8, 32);
FASTINFER_VECTOR(int32_t, i32x8, 32);
FASTINFER_VECTOR(uint32_t, u32x8, 32);
FASTINFER_VECTOR(int16_t, i16x16, 32);
FASTINFER_VECTOR(uint16_t, u16x16, 32);
FASTINFER_VECTOR(int8_t, i8x32, 32);
FASTINFER_VECTOR(uint8_t, u8x32, 32);

FASTINFER_VECTOR(float, f32x16, 64);
FASTINFER_VECTOR(int32_t, i32x16, 64);
FASTINFER_VECTOR(uint32_t, u32x16, 64);
FASTINFER_VECTOR(int16_t, i16x32, 64);
FASTINFER_VECTOR(uint16_t, u16x32, 64);
FASTINFER_VECTOR(int8_t, i8x64, 64);
FASTINFER_VECTOR(uint8_t, u8x64, 64);
#undef FASTINFER_VECTOR

}  // namespace fastinfer::cpu::FASTINFER_ISA
