// AMX tiles in software, bit for bit, so that kernels in tiles are tested on any machine with AVX2.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/cpu/intrinsics.h"

namespace fastinfer::cpu::FASTINFER_ISA {

// Denormals become zeros and keep their signs.
FASTINFER_INLINE f32x8 flush(f32x8 v) {
  const u32x8 bits = (u32x8)v;
  const u32x8 denormal = (u32x8)((bits & 0x7f800000u) == 0u);
  return (f32x8)(bits & ~(denormal & 0x7fffffffu));
}

class Tiles {
 public:
  Tiles() = default;
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

  template <int kTile>
  void zero() {
    std::memset(tiles_[kTile], 0, kTileBytes);
  }

  template <int kTile>
  void load(const void* data, int64_t stride) {
    for (int row = 0; row < 16; ++row) {
      std::memcpy(tiles_[kTile][row], static_cast<const char*>(data) + row * stride, 64);
    }
  }

  template <int kTile>
  void load_once(const void* data, int64_t stride) {
    load<kTile>(data, stride);
  }

  template <int kTile>
  void store(void* data, int64_t stride) const {
    for (int row = 0; row < 16; ++row) std::memcpy(static_cast<char*>(data) + row * stride, tiles_[kTile][row], 64);
  }

  // tdpbf16ps as Intel's manual has it: for each sum, a chain of multiply-adds over the even inputs and one over the
  // odd ones, both from 0; their sum is added to what was there. Everything rounds to nearest even, and denormals count
  // as zero in arguments and in results, whatever MXCSR says. That multiply-adds are fused was measured on a Xeon, as
  // was the order. That a result is flushed if it is below the normal numbers after it was rounded as a denormal is
  // assumed.
  template <int kSum, int kA, int kB>
  void multiply() {
    static_assert(kSum != kA && kSum != kB && kA != kB);
    for (int row = 0; row < 16; ++row) {
      for (int column = 0; column < 16; column += 8) {
        f32x8 even{}, odd{};
        for (int pair = 0; pair < 16; ++pair) {
          const u32x8 a = u32x8{} + tiles_[kA][row][pair], b = load_lanes(&tiles_[kB][pair][column]);
          even = flush(fused_multiply_add(flush((f32x8)(a << 16)), flush((f32x8)(b << 16)), even));
          odd = flush(fused_multiply_add(flush((f32x8)(a & 0xffff0000u)), flush((f32x8)(b & 0xffff0000u)), odd));
        }
        uint32_t* const sums = &tiles_[kSum][row][column];
        const f32x8 sum = flush(flush((f32x8)load_lanes(sums)) + flush(even + odd));
        std::memcpy(sums, &sum, sizeof(sum));
      }
    }
  }

  // tdpbssd: sums that overflow wrap.
  template <int kSum, int kA, int kB>
  void multiply_bytes() {
    static_assert(kSum != kA && kSum != kB && kA != kB);
    for (int row = 0; row < 16; ++row) {
      for (int four = 0; four < 16; ++four) {
        int8_t a[4], b[16][4];
        std::memcpy(a, &tiles_[kA][row][four], sizeof(a));
        std::memcpy(b, tiles_[kB][four], sizeof(b));
        for (int column = 0; column < 16; ++column) {
          int32_t sum = 0;
          for (int i = 0; i < 4; ++i) sum += a[i] * b[column][i];
          tiles_[kSum][row][column] += static_cast<uint32_t>(sum);
        }
      }
    }
  }

 private:
  static u32x8 load_lanes(const uint32_t* p) {
    u32x8 v;
    std::memcpy(&v, p, sizeof(v));
    return v;
  }

  alignas(64) uint32_t tiles_[8][16][16];
};

}  // namespace fastinfer::cpu::FASTINFER_ISA
