// csrc/common/cuda/ptx.h on the emulator: the same functions, after the PTX manual's fragment layouts.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "common/cuda/vector_io.h"
#include "emulator.h"

namespace fastinfer::cuda {

using emulation::Site;

// ---- memory ----

inline unsigned char* dynamic_shared() {
  return static_cast<unsigned char*>(emulation::dynamic_shared());
}

// The data arrive at the wait; until then the destination is poison, and reading it is a race besides. One access each,
// as on a GPU, so that the build that counts them sees it.
template <int kBytes>
void cp_async_bytes(void* shared, const void* global, bool valid, Site site) {
  struct alignas(kBytes) Piece {
    unsigned char bytes[kBytes];
  };
  emulation::Copy copy{shared, {}, kBytes};
  if (reinterpret_cast<uintptr_t>(shared) % kBytes != 0) emulation::trap("misaligned cp.async destination", site);
  if (valid) {
    if (reinterpret_cast<uintptr_t>(global) % kBytes != 0) emulation::trap("misaligned cp.async source", site);
    const Piece piece = *static_cast<const Piece*>(global);
    std::memcpy(copy.data, &piece, kBytes);
  }
  Piece poison;
  std::memset(&poison, 0xff, kBytes);
  *static_cast<Piece*>(shared) = poison;
  emulation::enqueue(copy);
}

inline void cp_async(void* shared, const void* global, bool valid = true, Site site = Site::current()) {
  cp_async_bytes<16>(shared, global, valid, site);
}

template <int kBytes>
void cp_async_small(void* shared, const void* global, bool valid = true, Site site = Site::current()) {
  static_assert(kBytes == 4 || kBytes == 8);
  cp_async_bytes<kBytes>(shared, global, valid, site);
}

inline Vector<float, 4> load_once(const Vector<float, 4>* p) {
  return *p;
}

inline void store_once(Vector<float, 4>* p, const Vector<float, 4>& v) {
  *p = v;
}

inline void cp_async_commit() {
  emulation::commit_copies();
}

template <int kPending>
void cp_async_wait() {
  for (const emulation::Copy& copy : emulation::arrived_copies(kPending)) std::memcpy(copy.to, copy.data, copy.bytes);
}

// ---- matrix fragments ----

namespace detail {

template <int kMatrices>
void load_matrix(uint32_t (&r)[kMatrices], const void* row, bool transposed, Site site) {
  uint16_t elements[8] = {};
  if (emulation::thread_index.x % 32 < 8 * kMatrices) {  // each lane reads its own row, for the sanitizers
    if (reinterpret_cast<uintptr_t>(row) % 16 != 0) emulation::trap("misaligned ldmatrix row", site);
    std::memcpy(elements, row, sizeof elements);
  }
  emulation::load_matrix(r, elements, kMatrices, transposed, site);
}

}  // namespace detail

inline void ldmatrix(uint32_t (&r)[4], const void* row, Site site = Site::current()) {
  detail::load_matrix(r, row, false, site);
}

inline void ldmatrix(uint32_t (&r)[2], const void* row, Site site = Site::current()) {
  detail::load_matrix(r, row, false, site);
}

inline void ldmatrix_transposed(uint32_t (&r)[4], const void* row, Site site = Site::current()) {
  detail::load_matrix(r, row, true, site);
}

template <class T>
void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Site site = Site::current()) {
  constexpr bool kHalf = std::is_same_v<T, __half>;
  static_assert(kHalf || std::is_same_v<T, __nv_bfloat16>);
  emulation::mma(kHalf ? emulation::Element::kHalf : emulation::Element::kBFloat16, d, a, b, site);
}

inline void mma_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Site site = Site::current()) {
  emulation::mma(emulation::Element::kTf32, d, a, b, site);
}

inline void mma_int8(int32_t (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Site site = Site::current()) {
  emulation::mma(emulation::Element::kInt8, d, a, b, site);
}

// ---- bits and packed arithmetic ----

template <int kTable>
uint32_t lop3(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d = 0;
  for (int i = 0; i < 8; ++i) {
    if (kTable >> i & 1) d |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  }
  return d;
}

inline uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = uint64_t{b} << 32 | a;
  uint32_t d = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t pick = selector >> (4 * i) & 0xf;
    uint32_t byte = static_cast<uint32_t>(bytes >> (8 * (pick & 7))) & 0xff;
    if (pick & 8) byte = byte & 0x80 ? 0xff : 0;  // the sign, replicated
    d |= byte << (8 * i);
  }
  return d;
}

namespace detail {

inline float half_at(uint32_t word, int i, __half) {
  return __half2float(__half(__half_raw{static_cast<unsigned short>(word >> (16 * i))}));
}
inline float half_at(uint32_t word, int i, __nv_bfloat16) {
  return std::bit_cast<float>(word >> (16 * i) << 16);
}

inline uint32_t bits_of(float value, __half) {
  return __half_raw(__float2half_rn(value)).x;
}
inline uint32_t bits_of(float value, __nv_bfloat16) {
  return __nv_bfloat16_raw(__float2bfloat16_rn(value)).x;
}

// Products of two 16-bit floats are exact in double, and so rounded once but for the double's own rounding of a sum.
template <class T, class Fn>
uint32_t elementwise(Fn&& fn) {
  return bits_of(static_cast<float>(fn(0)), T{}) | bits_of(static_cast<float>(fn(1)), T{}) << 16;
}

}  // namespace detail

template <class T>
uint32_t fma2(uint32_t a, uint32_t b, uint32_t c) {
  return detail::elementwise<T>([&](int i) {
    return double{detail::half_at(a, i, T{})} * detail::half_at(b, i, T{}) + detail::half_at(c, i, T{});
  });
}
template <class T>
uint32_t sub2(uint32_t a, uint32_t b) {
  return detail::elementwise<T>([&](int i) { return detail::half_at(a, i, T{}) - detail::half_at(b, i, T{}); });
}
template <class T>
uint32_t mul2(uint32_t a, uint32_t b) {
  return detail::elementwise<T>([&](int i) { return detail::half_at(a, i, T{}) * detail::half_at(b, i, T{}); });
}

inline float exp2_approx(float x) {
  const float y = std::exp2(x);
  return y < 0x1p-126f ? 0.0f : y;  // NaN stays
}

inline unsigned opaque(unsigned value) {
  return value;
}
template <class T>
const T* opaque(const T* value) {
  return value;
}

// ---- between blocks and grids ----

inline void named_barrier(int id, int threads, Site site = Site::current()) {
  emulation::block_barrier(id, threads, site);
}

inline uint32_t add_acquire_release(uint32_t* counter, uint32_t value) {
  return __atomic_fetch_add(counter, value, __ATOMIC_ACQ_REL);
}

inline void grid_dependency_wait(Site site = Site::current()) {
  emulation::grid_dependency_wait(site);
}
inline void grid_dependency_launch() {}

// ---- between GPUs ----

// Fences apply to these alone, so they order memory by themselves.
inline void store_release_system(uint64_t* p, uint64_t value) {
  __atomic_store_n(p, value, __ATOMIC_RELEASE);
}

// Whoever looks for another rank's value lets that rank run.
inline uint64_t load_acquire_system(const uint64_t* p) {
  emulation::yield();
  return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}

inline uint64_t global_nanoseconds() {
  return emulation::nanoseconds();
}

}  // namespace fastinfer::cuda
