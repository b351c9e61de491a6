// csrc/common/cuda/wgmma.h on the emulator: the same functions. A product's operands are read in two halves, when it is
// issued and when it is waited for: whatever is not there yet, or no longer, makes the result wrong.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/cuda/ptx.h"
#include "emulator.h"

namespace fastinfer::cuda {

// In two of the builds, so that kernels are tested with and without.
#if defined(EMULATION_PLAIN) || defined(EMULATION_ADDRESS)
inline constexpr bool kHasWgmma = true;
#else
inline constexpr bool kHasWgmma = false;
#endif

namespace detail {

template <class T>
using Sum = std::conditional_t<std::is_same_v<T, int8_t>, int32_t, float>;

// What sanitizers need not see: two thirds of the time under AddressSanitizer would be these.
#define EMULATION_UNCHECKED [[gnu::no_sanitize("address"), gnu::no_sanitize("undefined"), gnu::optimize("O2")]]

template <class T>
EMULATION_UNCHECKED Sum<T> element_at(uint32_t word, int i) {
  if constexpr (std::is_same_v<T, int8_t>) {
    return static_cast<int8_t>(word >> (8 * i));
  } else {
    return half_at(word, i, T{});
  }
}

template <int kBytes>
void load_words(uint32_t (&to)[kBytes / 4], unsigned place) {
  const unsigned char* const shared = static_cast<const unsigned char*>(emulation::dynamic_shared());
  std::memcpy(to, __builtin_assume_aligned(shared + (place ^ (place >> 7 & 7) << 4), kBytes), kBytes);
}

// The elements in kBytes that lie at this place before the swizzle.
template <class T, int kBytes>
EMULATION_UNCHECKED void load_piece(Sum<T> (&to)[kBytes / sizeof(T)], unsigned place) {
  uint32_t words[kBytes / 4];
  load_words<kBytes>(words, place);
  constexpr int kRun = 4 / sizeof(T);
  for (int i = 0; i < kBytes / 4 * kRun; ++i) to[i] = element_at<T>(words[i / kRun], i % kRun);
}

// The part of a thread's sums over the first or second 16 bytes of k.
template <class T, int kColumns, bool kShared, bool kTransposed>
EMULATION_UNCHECKED void add_half(const emulation::Product& p, void* d, int half) {
  constexpr int kRun = 4 / sizeof(T), kInputs = 4 * kRun;
  const unsigned lane = p.thread % 32, g = lane / 4, t = lane % 4;
  Sum<T> a[2][kInputs];
  for (unsigned h = 0; h < 2; ++h) {
    const unsigned row = p.thread / 32 % 4 * 16 + 8 * h + g;
    if constexpr (kShared) {
      load_piece<T, 16>(a[h], (p.a & 0x3fff) * 16 + row / 8 * 1024 + row % 8 * 128 + half * 16);
    } else {
      for (int i = 0; i < kInputs; ++i) a[h][i] = element_at<T>(p.a_quad[i / kRun][2 * half + h], i % kRun);
    }
  }
  Sum<T>* const sums = static_cast<Sum<T>*>(d);
  const unsigned start = (p.b & 0x3fff) * 16, panel_bytes = (p.b >> 16 & 0x3fff) * 16;
  for (unsigned j = 0; j < kColumns / 8; ++j) {
    Sum<T> b[2][kInputs];  // columns 8j + 2t and 8j + 2t + 1
    if constexpr (kTransposed) {
      for (unsigned i = 0; i < 8; ++i) {
        float pair[2];
        load_piece<T, 4>(pair, start + j / 8 * panel_bytes + (8 * half + i) * 128 + j % 8 * 16 + t * 4);
        b[0][i] = pair[0], b[1][i] = pair[1];
      }
    } else {
      for (unsigned e = 0; e < 2; ++e) load_piece<T, 16>(b[e], start + j * 1024 + (2 * t + e) * 128 + half * 16);
    }
    for (int i = 0; i < 4; ++i) {
      for (int l = 0; l < kInputs; ++l) sums[4 * j + i] += a[i / 2][l] * b[i % 2][l];
    }
  }
}

inline bool is_matrix(uint64_t matrix) {
  return matrix >> 62 == 1 && (matrix >> 32 & 0x3fff) == 1024 / 16;
}

}  // namespace detail

inline void fence_async_shared() {
  emulation::fence_async_shared();
}

template <class... Registers>
void wgmma_fence(Registers&... registers) {
  (static_cast<void>(registers), ...);
  emulation::fence_products();
}

inline void wgmma_commit() {
  emulation::commit_products();
}

template <int kPending, class... Registers>
void wgmma_wait(Registers&... registers) {
  (static_cast<void>(registers), ...);
  emulation::wait_for_products(kPending);
}

inline uint64_t wgmma_matrix(const void* shared, int panel_bytes = 0, Site site = Site::current()) {
  const auto start = static_cast<const unsigned char*>(shared) - dynamic_shared();
  if (start < 0 || start >= 1 << 18) emulation::trap("a matrix outside shared memory", site);
  if (start % 1024 != 0 || panel_bytes % 1024 != 0) emulation::trap("misaligned matrix in shared memory", site);
  return static_cast<uint64_t>(start / 16 | panel_bytes / 16 << 16) | uint64_t{1024 / 16} << 32 | uint64_t{1} << 62;
}

template <class T, int kColumns>
void wgmma(float (&d)[kColumns / 2], uint64_t a, uint64_t b, bool adds = true, Site site = Site::current()) {
  if (!detail::is_matrix(a) || !detail::is_matrix(b)) emulation::trap("not a wgmma_matrix", site);
  emulation::issue({.a = a, .b = b, .add_half = detail::add_half<T, kColumns, true, false>}, d, sizeof d, adds, site);
}

template <class T, int kColumns, bool kTransposed>
void wgmma(float (&d)[kColumns / 2], const uint32_t (&a)[4], uint64_t b, bool adds = true,
           Site site = Site::current()) {
  if (!detail::is_matrix(b)) emulation::trap("not a wgmma_matrix", site);
  emulation::Product product{.b = b, .add_half = detail::add_half<T, kColumns, false, kTransposed>};
  emulation::share_in_quad(a, product.a_quad, site);
  emulation::issue(product, d, sizeof d, adds, site);
}

template <int kColumns>
void wgmma_int8(int32_t (&d)[kColumns / 2], const uint32_t (&a)[4], uint64_t b, bool adds = true,
                Site site = Site::current()) {
  if (!detail::is_matrix(b)) emulation::trap("not a wgmma_matrix", site);
  emulation::Product product{.b = b, .add_half = detail::add_half<int8_t, kColumns, false, false>};
  emulation::share_in_quad(a, product.a_quad, site);
  emulation::issue(product, d, sizeof d, adds, site);
}

}  // namespace fastinfer::cuda
