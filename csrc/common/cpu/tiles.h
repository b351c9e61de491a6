// The tile registers of AMX and their products, and the same in software (common/cpu/emulated_tiles.h): which one,
// the build decides; a build without FASTINFER_TILES has neither. Inline assembly, because GCC 12's header lets the
// compiler remove stores of what a tile loads.
//
// A tile is 16 rows of 64 bytes. In multiply<kSum, kA, kB>() tile kSum has fp32 [16][16], kA bf16 [16][32], and kB
// pairs of inputs, bf16 [16][16][2]; the three must differ.
#pragma once

#include <cstdint>

#include "common/cpu/vector_types.h"

namespace fastinfer::cpu::FASTINFER_ISA {

inline constexpr int kTileBytes = 1024;

}  // namespace fastinfer::cpu::FASTINFER_ISA

#if defined(FASTINFER_EMULATED_TILES)
#include "common/cpu/emulated_tiles.h"
#elif defined(FASTINFER_TILES)

namespace fastinfer::cpu::FASTINFER_ISA {

// Holds this thread's tiles. Their configuration belongs to the thread, and other libraries change it: make one of
// these in each parallel region, and call nothing foreign while it lives.
class Tiles {
 public:
  Tiles() {
    struct alignas(64) Configuration {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    };
    static_assert(sizeof(Configuration) == 64);
    const Configuration configuration;
    asm volatile("ldtilecfg %0" ::"m"(configuration) : "memory");
  }
  ~Tiles() {
    asm volatile("tilerelease" ::: "memory");
  }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

  template <int kTile>
  FASTINFER_INLINE void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
  }

  // Rows `stride` bytes apart.
  template <int kTile>
  FASTINFER_INLINE void load(const void* data, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(data), "r"(stride), "i"(kTile) : "memory");
  }

  // The same of what is read once: it does not displace what else is in the L1.
  template <int kTile>
  FASTINFER_INLINE void load_once(const void* data, int64_t stride) {
    asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(data), "r"(stride), "i"(kTile) : "memory");
  }

  template <int kTile>
  FASTINFER_INLINE void store(void* data, int64_t stride) const {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(data), "r"(stride), "i"(kTile) : "memory");
  }

  // tdpbf16ps.
  template <int kSum, int kA, int kB>
  FASTINFER_INLINE void multiply() {
    static_assert(kSum != kA && kSum != kB && kA != kB);
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kA), "i"(kB));
  }

  // tdpbssd: the same of signed bytes, int32 sums, four inputs in the place of two.
  template <int kSum, int kA, int kB>
  FASTINFER_INLINE void multiply_bytes() {
    static_assert(kSum != kA && kSum != kB && kA != kB);
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kA), "i"(kB));
  }
};

}  // namespace fastinfer::cpu::FASTINFER_ISA

#endif
