// The machine's ceilings, measured: what no kernel of this instruction set can pass.
#pragma once

#include <cstdint>

#include "common/cpu/isa.h"

namespace fastinfer::cpu {

enum class Ceiling {
  kRead,       // bytes read; each thread reads its own stretch of the memory from front to back
  kByteDot,    // operations (a product and its addition are two) of the int4 kernels' byte products
  kFp32Fma,    // operations of fp32 multiply-adds
  kBf16Dot,    // operations of bf16 dot products, where the machine has them
  kBf16Tiles,  // operations of bf16 products in tiles, with AMX
  kInt8Tiles,  // operations of int8 products in tiles, with AMX
};

struct RooflineParams {
  Ceiling ceiling;
  const char* memory;        // of kRead: [threads, bytes_per_thread], 64-byte aligned
  int64_t bytes_per_thread;  // of kRead: a multiple of 512
  int64_t passes;            // over the memory; of 1,024 register-only steps otherwise
  double* work;              // out: bytes or operations of all threads together; 0 if the machine cannot
};

}  // namespace fastinfer::cpu

FASTINFER_CPU_KERNEL_AMX(roofline, fastinfer::cpu::RooflineParams)
