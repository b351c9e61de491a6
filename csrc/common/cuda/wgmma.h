// Hopper's matrix products of a warpgroup (sm_90a), beside the other wrappers in common/cuda/ptx.h.
//
// Four warps, of which the first has a number divisible by four, issue a product together. It reads its operands from
// shared memory while the warps go on, and is done when they wait for it:
//
//   fence_async_shared(); __syncthreads();   // what threads wrote to shared memory can be read by products
//   wgmma_fence(d);                          // registers can be read and written by products
//   wgmma<T, kColumns>(d, a, b); ...         // several, one after another
//   wgmma_commit();                          // they are a group
//   wgmma_wait<0>(d);                        // the group is done, d may be read, and operands may be overwritten
//
// In shared memory, a matrix has rows of 128 bytes (64 elements), of which eight are a square of 1024 bytes, aligned to
// that. The 16-byte piece i of row r is at piece i ^ r % 8 of the row (matrix_swizzle). Rows go along the inner
// dimension k of the product (K-major) or along the columns of b (transposed). Of int8, such a row has 128 elements.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "common/cuda/ptx.h"

namespace fastinfer::cuda {

// Whether the compiled code may use these functions. Elsewhere `if constexpr` leaves them out.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
inline constexpr bool kHasWgmma = true;
#else
inline constexpr bool kHasWgmma = false;
#endif

namespace detail {

// The compiler moves no access to sums from one side of this to the other.
__device__ inline void pin(float& x) {
  asm volatile("" : "+f"(x)::"memory");
}
// Asks for the operand to be in a register that is written here, and not where its value was computed: that may be
// before the wait for a product that reads the same register. ptxas may still merge the two;
// cmake/machine_code/operands.py looks at what it made.
__device__ inline void pin(uint32_t& x) {
  uint32_t y;
  asm volatile("mov.b32 %0, %1;" : "=r"(y) : "r"(x) : "memory");
  x = y;
}
__device__ inline void pin(int32_t& x) {
  asm volatile("" : "+r"(x)::"memory");
}
template <class T, int kCount>
__device__ inline void pin(T (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) pin(x[i]);
}

}  // namespace detail

// Makes this thread's writes to shared memory, also those of its copies that have arrived, visible to products that are
// issued after a barrier.
__device__ inline void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Comes before the first product of a group, and after every access to the registers that products take or give
// (arrays of float, int32_t or uint32_t).
template <class... Registers>
__device__ void wgmma_fence(Registers&... registers) {
  (detail::pin(registers), ...);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ inline void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most kPending of the warp's groups are under way. Registers that are read or written after it are
// arguments.
template <int kPending, class... Registers>
__device__ void wgmma_wait(Registers&... registers) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
  (detail::pin(registers), ...);
}

// A matrix in shared memory, from an aligned square on. Squares lie one after another, along the rows' other dimension.
// A matrix whose rows go along the columns of b and that has more than 64 columns consists of panels of 64 columns,
// which lie `panel_bytes` apart. Adding x >> 4 to the result moves the start by x bytes: 32 for the next 16 of k within
// a K-major row, 2048 for the next 16 rows of a transposed matrix.
__device__ inline uint64_t wgmma_matrix(const void* shared, int panel_bytes = 0) {
  constexpr uint64_t kSquareBytes = 1024, kSwizzle128 = 1;
  return (detail::shared_address(shared) & 0x3ffff) >> 4 | uint64_t{static_cast<uint32_t>(panel_bytes) >> 4} << 16 |
         kSquareBytes >> 4 << 32 | kSwizzle128 << 62;
}

// The instruction's text with kRegisters of d, which are its operands 0 .. kRegisters - 1; the others follow. TYPE is
// d's constraint: "+f" or "+r".
#define FASTINFER_WGMMA(SHAPE, TYPE, kRegisters, OPERANDS, ADDS, ...)                                     \
  asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, " ADDS ", 0;\nwgmma.mma_async.sync.aligned." SHAPE \
               " {" FASTINFER_TEXT_##kRegisters "}, " OPERANDS ";\n}"                                     \
               : FASTINFER_D_##kRegisters(TYPE)                                                           \
               : __VA_ARGS__, "r"(static_cast<int>(adds)))
#define FASTINFER_TEXT_32                                                                                \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FASTINFER_TEXT_64                                                                                  \
  FASTINFER_TEXT_32                                                                                        \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, " \
  "%52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define FASTINFER_TEXT_128                                                                                   \
  FASTINFER_TEXT_64                                                                                          \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, "   \
  "%84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, " \
  "%104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, "   \
  "%121, %122, %123, %124, %125, %126, %127"
#define FASTINFER_D_8(TYPE, i)                                                                                \
  TYPE(d[i]), TYPE(d[i + 1]), TYPE(d[i + 2]), TYPE(d[i + 3]), TYPE(d[i + 4]), TYPE(d[i + 5]), TYPE(d[i + 6]), \
      TYPE(d[i + 7])
#define FASTINFER_D_OF(TYPE, i) \
  FASTINFER_D_8(TYPE, i), FASTINFER_D_8(TYPE, i + 8), FASTINFER_D_8(TYPE, i + 16), FASTINFER_D_8(TYPE, i + 24)
#define FASTINFER_D_32(TYPE) FASTINFER_D_OF(TYPE, 0)
#define FASTINFER_D_64(TYPE) FASTINFER_D_32(TYPE), FASTINFER_D_OF(TYPE, 32)
#define FASTINFER_D_128(TYPE) FASTINFER_D_64(TYPE), FASTINFER_D_OF(TYPE, 64), FASTINFER_D_OF(TYPE, 96)

// d += a b for a [64, 16] and b [16, kColumns], both K-major, in shared memory; d = a b if `adds` is false. T is __half
// or __nv_bfloat16, sums are fp32. With w = warp % 4, g = lane / 4 and t = lane % 4 a thread holds
//   d[4j + 2h + e]   row 16w + 8h + g, column 8j + 2t + e
// which are mma's d for 16 rows by 8 columns, one after another.
template <class T, int kColumns>
__device__ inline void wgmma(float (&d)[kColumns / 2], uint64_t a, uint64_t b, bool adds = true) {
  constexpr bool kHalf = std::is_same_v<T, __half>;
  static_assert(kHalf || std::is_same_v<T, __nv_bfloat16>);
  static_assert(kColumns == 64 || kColumns == 128 || kColumns == 256);
#define FASTINFER_SHARED(SHAPE, kRegisters, A, B, ADDS) \
  FASTINFER_WGMMA(SHAPE, "+f", kRegisters, A ", " B ", adds, 1, 1, 0, 0", ADDS, "l"(a), "l"(b))
  if constexpr (kColumns == 64 && kHalf) FASTINFER_SHARED("m64n64k16.f32.f16.f16", 32, "%32", "%33", "%34");
  if constexpr (kColumns == 64 && !kHalf) FASTINFER_SHARED("m64n64k16.f32.bf16.bf16", 32, "%32", "%33", "%34");
  if constexpr (kColumns == 128 && kHalf) FASTINFER_SHARED("m64n128k16.f32.f16.f16", 64, "%64", "%65", "%66");
  if constexpr (kColumns == 128 && !kHalf) FASTINFER_SHARED("m64n128k16.f32.bf16.bf16", 64, "%64", "%65", "%66");
  if constexpr (kColumns == 256 && kHalf) FASTINFER_SHARED("m64n256k16.f32.f16.f16", 128, "%128", "%129", "%130");
  if constexpr (kColumns == 256 && !kHalf) FASTINFER_SHARED("m64n256k16.f32.bf16.bf16", 128, "%128", "%129", "%130");
#undef FASTINFER_SHARED
}

// The same with a in registers: of each warp 16 rows, as mma has them. b is K-major, or its rows are those of k if
// kTransposed. The registers are arguments of wgmma_fence, which comes after the wait for products that read them
// before.
template <class T, int kColumns, bool kTransposed>
__device__ inline void wgmma(float (&d)[kColumns / 2], const uint32_t (&a)[4], uint64_t b, bool adds = true) {
  constexpr bool kHalf = std::is_same_v<T, __half>;
  static_assert(kHalf || std::is_same_v<T, __nv_bfloat16>);
  static_assert(kColumns == 64 || kColumns == 128 || kColumns == 256);
#define FASTINFER_REGISTERS(SHAPE, kRegisters, A, B, TRANSPOSED, ADDS)                                            \
  FASTINFER_WGMMA(SHAPE, "+f", kRegisters, "{" A "}, " B ", adds, 1, 1, " TRANSPOSED, ADDS, "r"(a[0]), "r"(a[1]), \
                  "r"(a[2]), "r"(a[3]), "l"(b), "n"(static_cast<int>(kTransposed)))
  if constexpr (kColumns == 64 && kHalf) {
    FASTINFER_REGISTERS("m64n64k16.f32.f16.f16", 32, "%32, %33, %34, %35", "%36", "%37", "%38");
  }
  if constexpr (kColumns == 64 && !kHalf) {
    FASTINFER_REGISTERS("m64n64k16.f32.bf16.bf16", 32, "%32, %33, %34, %35", "%36", "%37", "%38");
  }
  if constexpr (kColumns == 128 && kHalf) {
    FASTINFER_REGISTERS("m64n128k16.f32.f16.f16", 64, "%64, %65, %66, %67", "%68", "%69", "%70");
  }
  if constexpr (kColumns == 128 && !kHalf) {
    FASTINFER_REGISTERS("m64n128k16.f32.bf16.bf16", 64, "%64, %65, %66, %67", "%68", "%69", "%70");
  }
  if constexpr (kColumns == 256 && kHalf) {
    FASTINFER_REGISTERS("m64n256k16.f32.f16.f16", 128, "%128, %129, %130, %131", "%132", "%133", "%134");
  }
  if constexpr (kColumns == 256 && !kHalf) {
    FASTINFER_REGISTERS("m64n256k16.f32.bf16.bf16", 128, "%128, %129, %130, %131", "%132", "%133", "%134");
  }
#undef FASTINFER_REGISTERS
}

// d += a b for int8 a [64, 32] in registers, as mma_int8 has them, and int8 b [32, kColumns], K-major in shared memory;
// sums are int32, d as above.
template <int kColumns>
__device__ inline void wgmma_int8(int32_t (&d)[kColumns / 2], const uint32_t (&a)[4], uint64_t b, bool adds = true) {
  static_assert(kColumns == 64 || kColumns == 256);
#define FASTINFER_INT8(SHAPE, kRegisters, OPERANDS, ADDS) \
  FASTINFER_WGMMA(SHAPE, "+r", kRegisters, OPERANDS ", adds", ADDS, "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
  if constexpr (kColumns == 64) FASTINFER_INT8("m64n64k32.s32.s8.s8", 32, "{%32, %33, %34, %35}, %36", "%37");
  if constexpr (kColumns == 256) FASTINFER_INT8("m64n256k32.s32.s8.s8", 128, "{%128, %129, %130, %131}, %132", "%133");
#undef FASTINFER_INT8
}

#undef FASTINFER_WGMMA
#undef FASTINFER_TEXT_32
#undef FASTINFER_TEXT_64
#undef FASTINFER_TEXT_128
#undef FASTINFER_D_8
#undef FASTINFER_D_OF
#undef FASTINFER_D_32
#undef FASTINFER_D_64
#undef FASTINFER_D_128

}  // namespace fastinfer::cuda
