// Loops that do nothing but keep one resource busy. Every accumulator is a variable of its own behind an empty asm
// statement, which costs nothing: it keeps the value in a register, and the compiler from seeing that nobody needs it.
#include "roofline/roofline.h"

#include "common/cpu/parallel.h"
#if defined(FASTINFER_TILES)
#include "common/cpu/tiles.h"
#endif
#include "common/cpu/vec.h"

namespace fastinfer::cpu::FASTINFER_ISA {
namespace {

// Vectors as wide as a register, unlike the portable build's other vectors, which have 16 lanes.
#if defined(FASTINFER_AVX512_VNNI)
inline constexpr int kBytes = 64;
#elif defined(FASTINFER_AVX2)
inline constexpr int kBytes = 32;
#else
inline constexpr int kBytes = 16;
#endif
typedef int32_t Words __attribute__((vector_size(kBytes)));
typedef int16_t Shorts __attribute__((vector_size(kBytes)));
typedef uint16_t UnsignedShorts __attribute__((vector_size(kBytes)));
typedef int8_t Bytes __attribute__((vector_size(kBytes)));
typedef uint8_t UnsignedBytes __attribute__((vector_size(kBytes)));
typedef float Floats __attribute__((vector_size(kBytes)));

#if defined(__x86_64__)
#define FASTINFER_KEEP(v) asm volatile("" : "+v"(v))
#else
#define FASTINFER_KEEP(v) asm volatile("" : "+w"(v))
#endif

// Latency times throughput of the instructions measured, 4 or 5 cycles and 2 a cycle, and some more, as ten of
// vpdpbusd's reached 0.82 of what twelve do; with the operands they leave two of 16 registers.
#define FASTINFER_TWELVE(statement)                                                                               \
  statement(a0) statement(a1) statement(a2) statement(a3) statement(a4) statement(a5) statement(a6) statement(a7) \
      statement(a8) statement(a9) statement(a10) statement(a11)
inline constexpr double kAccumulators = 12;
inline constexpr int64_t kSteps = 1024;

void read(const char* memory, int64_t bytes, int64_t passes) {
  Words a0{}, a1{}, a2{}, a3{}, a4{}, a5{}, a6{}, a7{};
  for (int64_t pass = 0; pass < passes; ++pass) {
    for (const char *p = memory, *end = memory + bytes; p < end; p += 8 * kBytes) {
#define FASTINFER_READ(a, i)           \
  a ^= load_as<Words>(p + i * kBytes); \
  FASTINFER_KEEP(a);
      FASTINFER_READ(a0, 0)
      FASTINFER_READ(a1, 1)
      FASTINFER_READ(a2, 2)
      FASTINFER_READ(a3, 3)
      FASTINFER_READ(a4, 4)
      FASTINFER_READ(a5, 5)
      FASTINFER_READ(a6, 6)
      FASTINFER_READ(a7, 7)
#undef FASTINFER_READ
    }
  }
}

// Returns the operations of one step. Only the multiplication is counted: vpmaddubsw alone runs twice a cycle on Zen 3,
// followed by an addition one and a half times.
double byte_dot(int64_t steps) {
  Words w{}, x{};
  FASTINFER_KEEP(w);
  FASTINFER_KEEP(x);
  Words a0{}, a1{}, a2{}, a3{}, a4{}, a5{}, a6{}, a7{}, a8{}, a9{}, a10{}, a11{};
#if defined(FASTINFER_AVX512_VNNI)
#define FASTINFER_DOT(a) dpbusd(a, (UnsignedBytes)w, (Bytes)x)
  constexpr double kProducts = 64;
#elif defined(FASTINFER_AVX2)
#define FASTINFER_DOT(a) (Words) maddubs((UnsignedBytes)w, (Bytes)x)
  constexpr double kProducts = 32;
#else
#define FASTINFER_DOT(a) (Words)((Shorts)w * (Shorts)x)
  constexpr double kProducts = kBytes / 2;
#endif
#define FASTINFER_STEP(a) \
  a = FASTINFER_DOT(a);   \
  FASTINFER_KEEP(a);      \
  FASTINFER_KEEP(w);
  for (int64_t step = 0; step < steps; ++step) {
    FASTINFER_TWELVE(FASTINFER_STEP)
  }
#undef FASTINFER_STEP
#undef FASTINFER_DOT
  return 2 * kProducts * kAccumulators;
}

double fp32_fma(int64_t steps) {
  Floats w{}, x{};
  FASTINFER_KEEP(w);
  FASTINFER_KEEP(x);
  Floats a0{}, a1{}, a2{}, a3{}, a4{}, a5{}, a6{}, a7{}, a8{}, a9{}, a10{}, a11{};
#define FASTINFER_STEP(a) \
  a += w * x;             \
  FASTINFER_KEEP(a);      \
  FASTINFER_KEEP(w);
  for (int64_t step = 0; step < steps; ++step) {
    FASTINFER_TWELVE(FASTINFER_STEP)
  }
#undef FASTINFER_STEP
  return 2.0 * kBytes / 4 * kAccumulators;
}

#if defined(FASTINFER_AVX512_BF16)
double bf16_dot(int64_t steps) {
  Words w{}, x{};
  FASTINFER_KEEP(w);
  FASTINFER_KEEP(x);
  Floats a0{}, a1{}, a2{}, a3{}, a4{}, a5{}, a6{}, a7{}, a8{}, a9{}, a10{}, a11{};
#define FASTINFER_STEP(a)                              \
  a = dpbf16(a, (UnsignedShorts)w, (UnsignedShorts)x); \
  FASTINFER_KEEP(a);
  for (int64_t step = 0; step < steps; ++step) {
    FASTINFER_TWELVE(FASTINFER_STEP)
  }
#undef FASTINFER_STEP
  return 2.0 * 32 * kAccumulators;
}
#endif

#if defined(FASTINFER_TILES)
// 2 x 2 tiles, as in products. Sixteen rows of 64 bytes on either side: 16 x 16 sums of 32 bf16 or 64 bytes each.
template <bool kBytesInTiles>
double tile_products(int64_t steps) {
  Tiles tiles;
  tiles.zero<0>();
  tiles.zero<1>();
  tiles.zero<2>();
  tiles.zero<3>();
  tiles.zero<4>();
  tiles.zero<5>();
  tiles.zero<6>();
  tiles.zero<7>();
  for (int64_t step = 0; step < steps; ++step) {
    if constexpr (kBytesInTiles) {
      tiles.multiply_bytes<0, 4, 6>();
      tiles.multiply_bytes<1, 4, 7>();
      tiles.multiply_bytes<2, 5, 6>();
      tiles.multiply_bytes<3, 5, 7>();
    } else {
      tiles.multiply<0, 4, 6>();
      tiles.multiply<1, 4, 7>();
      tiles.multiply<2, 5, 6>();
      tiles.multiply<3, 5, 7>();
    }
  }
  return 2.0 * 4 * 16 * 16 * (kBytesInTiles ? 64 : 32);
}
#endif

double run(const RooflineParams& p, int64_t thread) {
  switch (p.ceiling) {
    case Ceiling::kRead:
      read(p.memory + thread * p.bytes_per_thread, p.bytes_per_thread, p.passes);
      return static_cast<double>(p.bytes_per_thread) * p.passes;
    case Ceiling::kByteDot: return byte_dot(kSteps * p.passes) * kSteps * p.passes;
    case Ceiling::kFp32Fma: return fp32_fma(kSteps * p.passes) * kSteps * p.passes;
    case Ceiling::kBf16Dot:
#if defined(FASTINFER_AVX512_BF16)
      return bf16_dot(kSteps * p.passes) * kSteps * p.passes;
#endif
      return 0;
#if defined(FASTINFER_TILES)
    case Ceiling::kBf16Tiles: return tile_products<false>(kSteps * p.passes) * kSteps * p.passes;
    case Ceiling::kInt8Tiles: return tile_products<true>(kSteps * p.passes) * kSteps * p.passes;
#else
    case Ceiling::kBf16Tiles:
    case Ceiling::kInt8Tiles: return 0;
#endif
  }
  return 0;
}

}  // namespace

void roofline(const RooflineParams& p) {
  const int64_t threads = num_threads();
  parallel_for(threads, [&](int64_t begin, int64_t end) {
    for (int64_t thread = begin; thread < end; ++thread) {
      const double work = run(p, thread);
      if (thread == 0) *p.work = work * threads;  // the same for all
    }
  });
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
