// One wrapper per PTX instruction that CUDA C++ does not name. The PTX ISA manual
// (https://docs.nvidia.com/cuda/parallel-thread-execution/) gives the fragments' layouts; tests/emulation has the same
// functions for the host, so a kernel uses no other inline assembly than that of this file and common/cuda/wgmma.h.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "common/cuda/vector_io.h"

namespace fastinfer::cuda {

// ---- memory ----

// The block's dynamic shared memory, aligned to 1024 bytes.
__device__ inline unsigned char* dynamic_shared() {
  extern __shared__ __align__(1024) unsigned char memory[];
  return memory;
}

namespace detail {

__device__ inline uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

}  // namespace detail

// Copies 16 bytes from global to shared memory past the L1, asynchronously; both addresses are 16-byte aligned. With
// valid = false nothing is read and zeros are written.
__device__ inline void cp_async(void* shared, const void* global, bool valid = true) {
  asm volatile(
      "{\n.reg .pred invalid;\nsetp.eq.s32 invalid, %2, 0;\ncp.async.cg.shared.global [%0], [%1], 16, invalid;\n}" ::
          "r"(detail::shared_address(shared)),
      "l"(global), "r"(static_cast<int>(valid))
      : "memory");
}

// The same, 4 or 8 bytes at a time, for rows that are not 16-byte aligned.
template <int kBytes>
__device__ inline void cp_async_small(void* shared, const void* global, bool valid = true) {
  static_assert(kBytes == 4 || kBytes == 8);
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(detail::shared_address(shared)), "l"(global),
               "n"(kBytes), "r"(valid ? kBytes : 0)
               : "memory");
}

__device__ inline void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Four elements that nobody reads again soon: the L1 does not keep them, and the L2 fetches their line of 128 bytes.
__device__ inline Vector<float, 4> load_once(const Vector<float, 4>* p) {
  Vector<float, 4> v;
  asm volatile("ld.global.L1::no_allocate.L2::128B.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.values[0]), "=f"(v.values[1]), "=f"(v.values[2]), "=f"(v.values[3])
               : "l"(p));
  return v;
}

// The same for stores: the caches give up their lines first.
__device__ inline void store_once(Vector<float, 4>* p, const Vector<float, 4>& v) {
  asm volatile("st.global.cs.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(v.values[0]), "f"(v.values[1]),
               "f"(v.values[2]), "f"(v.values[3])
               : "memory");
}

// Waits until at most kPending of this thread's groups are under way. Other threads' copies need a barrier after it.
template <int kPending>
__device__ inline void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// ---- matrix fragments ----

// Four 8x8 matrices of 16-bit elements from shared memory. Lanes 8i .. 8i+7 pass the 16-byte aligned rows of matrix i;
// lane l receives in r[i] the elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4 of matrix i.
__device__ inline void ldmatrix(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(detail::shared_address(row))
               : "memory");
}

// The same with each matrix transposed: lane l receives elements l / 4 of rows 2 (l % 4) and 2 (l % 4) + 1.
__device__ inline void ldmatrix_transposed(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(detail::shared_address(row))
               : "memory");
}

// Two 8x8 matrices: lanes 0 .. 15 pass the rows.
__device__ inline void ldmatrix(uint32_t (&r)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(detail::shared_address(row))
               : "memory");
}

// d += a b for a [16, 16], b [16, 8], d [16, 8]; T is __half or __nv_bfloat16, sums are fp32. With g = lane / 4 and
// t = lane % 4 a lane holds, two elements a register, the lower column or row in the lower half:
//   a[0] row g, columns 2t, 2t+1;  a[1] row g+8;  a[2] row g, columns 2t+8, 2t+9;  a[3] row g+8 of those
//   b[0] rows 2t, 2t+1 of column g;  b[1] rows 2t+8, 2t+9
//   d[0], d[1] row g, columns 2t, 2t+1;  d[2], d[3] row g+8
template <class T>
__device__ void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);

template <>
__device__ inline void mma<__half>(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

template <>
__device__ inline void mma<__nv_bfloat16>(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// d += a b for a [16, 8], b [8, 8], d [16, 8], all fp32; of an element of a and b the lowest 13 bits are zero:
//   a[0] row g, column t;  a[1] row g+8;  a[2] row g, column t+4;  a[3] row g+8 of those
//   b[0] row t of column g;  b[1] row t+4;  d as above
__device__ inline void mma_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// d += a b for int8 a [16, 32], b [32, 8], int32 d [16, 8]; four elements a register:
//   a[0] row g, columns 4t .. 4t+3;  a[1] row g+8;  a[2] row g, columns 4t+16 ..;  a[3] row g+8 of those
//   b[0] rows 4t .. 4t+3 of column g;  b[1] rows 4t+16 ..;  d as above
__device__ inline void mma_int8(int32_t (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// ---- bits and packed arithmetic ----

// A bitwise function of three words: kTable is f(0xf0, 0xcc, 0xaa), so (a & b) | c is 0xea.
template <int kTable>
__device__ inline uint32_t lop3(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(d) : "r"(a), "r"(b), "r"(c), "n"(kTable));
  return d;
}

// Four bytes of b:a, picked by the selector's nibbles; byte 0 is a's lowest, byte 4 b's.
__device__ inline uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
  return d;
}

// Two 16-bit floats in a register: a b + c, a - b, a b; rounded to nearest even.
template <class T>
__device__ uint32_t fma2(uint32_t a, uint32_t b, uint32_t c);
template <class T>
__device__ uint32_t sub2(uint32_t a, uint32_t b);
template <class T>
__device__ uint32_t mul2(uint32_t a, uint32_t b);

template <>
__device__ inline uint32_t fma2<__half>(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
template <>
__device__ inline uint32_t fma2<__nv_bfloat16>(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
template <>
__device__ inline uint32_t sub2<__half>(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
template <>
__device__ inline uint32_t sub2<__nv_bfloat16>(uint32_t a, uint32_t b) {
  return fma2<__nv_bfloat16>(b, 0xbf80bf80u, a);  // b * -1 + a: before sm_90 bf16 has no subtraction
}
template <>
__device__ inline uint32_t mul2<__half>(uint32_t a, uint32_t b) {
  uint32_t d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
template <>
__device__ inline uint32_t mul2<__nv_bfloat16>(uint32_t a, uint32_t b) {
  return fma2<__nv_bfloat16>(a, b, 0x80008000u);  // a b + -0
}

// 2^x to within 2 ulp, subnormal results as 0; -inf gives 0.
__device__ inline float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The value itself, of which the compiler knows nothing: what is computed from it is computed where it stands, instead
// of once before a loop and kept in registers that the loop needs.
__device__ inline unsigned opaque(unsigned value) {
  asm volatile("" : "+r"(value));
  return value;
}
template <class T>
__device__ const T* opaque(const T* value) {
  asm volatile("" : "+l"(value));
  return value;
}

// ---- between blocks and grids ----

// A barrier of `threads` of the block's threads, a multiple of 32; id 1 .. 15 (0 is __syncthreads).
__device__ inline void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Adds to a counter, and returns what it was. What the block's threads have written before a barrier in front of this
// is visible, after a barrier behind it, to the blocks that add later. (A fence by each thread took longer.)
__device__ inline uint32_t add_acquire_release(uint32_t* counter, uint32_t value) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(value) : "memory");
  return before;
}

// Programmatic dependent launch, from sm_90 on. A kernel that is launched with `dependent` may start before the kernel
// before it in the stream has ended: no global memory may be touched before this wait. (Not even weights, as they may
// be the result of the kernel before, unless the caller has promised that they are not: binding/constant_weights.h.)
__device__ inline void grid_dependency_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel's blocks may be scheduled once every block has called this or ended. It comes after the wait: when a
// kernel begins, all but the one before it have then ended.
__device__ inline void grid_dependency_launch() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- between GPUs ----

// What the block's threads have written before a barrier is visible to who reads the value by load_acquire_system, on
// any GPU or the host, and to that reader's block after a barrier.
__device__ inline void store_release_system(uint64_t* p, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(value) : "memory");
}

__device__ inline uint64_t load_acquire_system(const uint64_t* p) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(p) : "memory");
  return value;
}

// A clock that all multiprocessors share. It may advance in steps of a microsecond.
__device__ inline uint64_t global_nanoseconds() {
  uint64_t value;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(value));
  return value;
}

}  // namespace fastinfer::cuda
