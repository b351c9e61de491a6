// The part of CUDA C++ that a .cu file may use, for g++: the toolkit's own vector types and 16-bit floats, and the
// built-in variables and functions on the emulator. Included before each .cu file.
#pragma once

#include <host_defines.h>
#include <vector_functions.h>
#include <vector_types.h>

#undef __shared__
#undef __launch_bounds__
#undef __grid_constant__
#define __shared__ _Pragma("GCC error \"use dynamic_shared(): sanitizers do not see static shared variables\"")
#define __launch_bounds__(...)
#define __grid_constant__

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "emulator.h"

#define threadIdx ::emulation::thread_index
#define blockIdx ::emulation::block_index
#define blockDim ::emulation::block_size
#define gridDim ::emulation::grid_size

using std::max;
using std::min;

// ---- warps ----

namespace emulation {

template <class T>
T shuffle_as(uint32_t mask, T value, int source, Site site) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = shuffle(mask, bits, source, site);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline int lane() {
  return static_cast<int>(thread_index.x % 32);
}

}  // namespace emulation

template <class T>
T __shfl_sync(uint32_t mask, T value, int source, int width = 32, emulation::Site site = emulation::Site::current()) {
  const int lane = emulation::lane();
  return emulation::shuffle_as(mask, value, lane / width * width + ((source % width) + width) % width, site);
}
template <class T>
T __shfl_xor_sync(uint32_t mask, T value, int bits, int width = 32, emulation::Site site = emulation::Site::current()) {
  const int lane = emulation::lane(), source = lane ^ bits;
  return emulation::shuffle_as(mask, value, source / width > lane / width ? lane : source, site);
}
template <class T>
T __shfl_up_sync(uint32_t mask, T value, unsigned delta, int width = 32,
                 emulation::Site site = emulation::Site::current()) {
  const int lane = emulation::lane(), source = lane - static_cast<int>(delta);
  return emulation::shuffle_as(mask, value, source < lane / width * width ? lane : source, site);
}
template <class T>
T __shfl_down_sync(uint32_t mask, T value, unsigned delta, int width = 32,
                   emulation::Site site = emulation::Site::current()) {
  const int lane = emulation::lane(), source = lane + static_cast<int>(delta);
  return emulation::shuffle_as(mask, value, source >= (lane / width + 1) * width ? lane : source, site);
}
inline uint32_t __ballot_sync(uint32_t mask, int value, emulation::Site site = emulation::Site::current()) {
  return emulation::vote(mask, value != 0, site);
}
inline int __any_sync(uint32_t mask, int value, emulation::Site site = emulation::Site::current()) {
  return emulation::vote(mask, value != 0, site) != 0;
}
inline int __all_sync(uint32_t mask, int value, emulation::Site site = emulation::Site::current()) {
  return emulation::vote(mask, value != 0, site) == mask;
}

// ---- barriers ----

inline void __syncthreads(emulation::Site site = emulation::Site::current()) {
  emulation::block_barrier(0, 0, site);
}
inline void __syncwarp(uint32_t mask = 0xffffffffu, emulation::Site site = emulation::Site::current()) {
  emulation::warp_barrier(mask, site);
}
// Barriers with a vote.
inline int __syncthreads_count(int value, emulation::Site site = emulation::Site::current()) {
  return emulation::block_vote(value != 0, site);
}
inline int __syncthreads_or(int value, emulation::Site site = emulation::Site::current()) {
  return emulation::block_vote(value != 0, site) != 0;
}
inline int __syncthreads_and(int value, emulation::Site site = emulation::Site::current()) {
  return emulation::block_vote(value != 0, site) == static_cast<int>(blockDim.x);
}

// ---- memory ----

// Atomic operations are relaxed, as on a GPU: fences order the rest.
inline void __threadfence() {
  emulation::fence();
}
template <class T>
T __ldg(const T* p) {
  return *p;
}
template <class T>
T __ldcg(const T* p) {
  return *p;
}
template <class T, class U>
T atomicAdd(T* p, U value) {
  emulation::atomic_operation(p);
  if constexpr (std::is_floating_point_v<T>) {
    T old, sum;
    __atomic_load(p, &old, __ATOMIC_RELAXED);
    do {
      sum = old + value;
    } while (!__atomic_compare_exchange(p, &old, &sum, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return old;
  } else {
    return __atomic_fetch_add(p, static_cast<T>(value), __ATOMIC_RELAXED);
  }
}
template <class T, class U>
T atomicExch(T* p, U value) {
  emulation::atomic_operation(p);
  return __atomic_exchange_n(p, static_cast<T>(value), __ATOMIC_RELAXED);
}
template <class T>
T atomicCAS(T* p, T expected, T desired) {
  emulation::atomic_operation(p);
  __atomic_compare_exchange_n(p, &expected, desired, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;
}
template <class T, class U>
T atomicMax(T* p, U value) {
  emulation::atomic_operation(p);
  T old = __atomic_load_n(p, __ATOMIC_RELAXED);
  while (old < static_cast<T>(value) && atomicCAS(p, old, static_cast<T>(value)) != old) {
    old = __atomic_load_n(p, __ATOMIC_RELAXED);
  }
  return old;
}
template <class T, class U>
T atomicMin(T* p, U value) {
  emulation::atomic_operation(p);
  T old = __atomic_load_n(p, __ATOMIC_RELAXED);
  while (static_cast<T>(value) < old && atomicCAS(p, old, static_cast<T>(value)) != old) {
    old = __atomic_load_n(p, __ATOMIC_RELAXED);
  }
  return old;
}
template <class T, class U>
T atomicOr(T* p, U value) {
  emulation::atomic_operation(p);
  return __atomic_fetch_or(p, static_cast<T>(value), __ATOMIC_RELAXED);
}

// ---- arithmetic ----

inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<unsigned long long>(a) * b >> 32);
}
inline float rsqrtf(float x) {
  return 1.0f / std::sqrt(x);
}
inline float __expf(float x) {
  return std::exp(x);
}
inline float __logf(float x) {
  return std::log(x);
}
inline float __fdividef(float a, float b) {
  return a / b;
}
inline float __frcp_rn(float x) {
  return 1.0f / x;
}
inline float __saturatef(float x) {
  return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f;  // NaN gives 0
}
inline int __float2int_rn(float x) {
  return static_cast<int>(std::nearbyint(x));
}
inline float __int_as_float(int x) {
  return std::bit_cast<float>(x);
}
inline float __uint_as_float(uint32_t x) {
  return std::bit_cast<float>(x);
}
inline int __float_as_int(float x) {
  return std::bit_cast<int>(x);
}
inline uint32_t __float_as_uint(float x) {
  return std::bit_cast<uint32_t>(x);
}
inline int __dp4a(int a, int b, int sum) {
  for (int shift = 0; shift < 32; shift += 8) sum += static_cast<int8_t>(a >> shift) * static_cast<int8_t>(b >> shift);
  return sum;
}
inline int __popc(uint32_t x) {
  return std::popcount(x);
}
inline int __ffs(int x) {
  return x == 0 ? 0 : std::countr_zero(static_cast<uint32_t>(x)) + 1;
}
inline int __clz(int x) {
  return std::countl_zero(static_cast<uint32_t>(x));
}
inline void __trap(emulation::Site site = emulation::Site::current()) {
  emulation::trap("trap", site);
}
