// The check of the CPU's tile instructions before their first use: the same steps with them and in software
// (common/cpu/emulated_tiles.h) must give the same bits. Kernels in tiles are tested in software on machines without
// AMX; this is what carries over to a machine that has it.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

namespace fastinfer::cpu {

inline constexpr int kCheckLoadStride = 80, kCheckStoreStride = 128;  // bytes between rows that are moved
inline constexpr int kFloatChecks = 5, kByteChecks = 2;

using TileWords = uint32_t[16][16];

// Two steps of 2 x 2 tiles, as multiply_tiles() in common/cpu/tile_products.h computes them.
struct TileCheckProducts {
  TileWords sums[4], a[4], b[4];  // a, b: two tiles of each step
};

struct TileCheckInputs {
  uint8_t rows[8][16 * kCheckLoadStride];
  TileCheckProducts floats[kFloatChecks], bytes[kByteChecks];
};

struct TileCheckResults {
  uint8_t moved[8][16 * kCheckStoreStride];
  TileWords zeroed[8], floats[4 * kFloatChecks], bytes[4 * kByteChecks];
};

using TileCheckSteps = void (*)(const TileCheckInputs&, TileCheckResults&);

// What `steps` compute otherwise than `expected` do, in a few words; empty if nothing. A NaN may be any other NaN:
// which one it is, the manual leaves open, and no kernel depends on it.
std::string tile_difference(TileCheckSteps steps, TileCheckSteps expected);

template <bool kBytes, int kSum, int kA, int kB, class Tiles>
void check_multiply(Tiles& tiles) {
  if constexpr (kBytes) {
    tiles.template multiply_bytes<kSum, kA, kB>();
  } else {
    tiles.template multiply<kSum, kA, kB>();
  }
}

template <bool kBytes, class Tiles>
void check_products(Tiles& tiles, const TileCheckProducts& in, TileWords* sums) {
  constexpr int64_t kRow = sizeof(in.sums[0][0]);
  tiles.template load<0>(in.sums[0], kRow);
  tiles.template load<1>(in.sums[1], kRow);
  tiles.template load<2>(in.sums[2], kRow);
  tiles.template load<3>(in.sums[3], kRow);
  for (int step = 0; step < 4; step += 2) {
    tiles.template load_once<4>(in.a[step], kRow);
    tiles.template load_once<5>(in.a[step + 1], kRow);
    tiles.template load<6>(in.b[step], kRow);
    tiles.template load<7>(in.b[step + 1], kRow);
    check_multiply<kBytes, 0, 4, 6>(tiles);
    check_multiply<kBytes, 1, 4, 7>(tiles);
    check_multiply<kBytes, 2, 5, 6>(tiles);
    check_multiply<kBytes, 3, 5, 7>(tiles);
  }
  tiles.template store<0>(sums[0], kRow);
  tiles.template store<1>(sums[1], kRow);
  tiles.template store<2>(sums[2], kRow);
  tiles.template store<3>(sums[3], kRow);
}

// All tiles have 16 rows of 64 bytes, as in the kernels: there are no others to check.
template <class Tiles>
void run_tile_check(const TileCheckInputs& in, TileCheckResults& out) {
  Tiles tiles;
  [&]<int... kTile>(std::integer_sequence<int, kTile...>) {
    (tiles.template load<kTile>(in.rows[kTile], kCheckLoadStride), ...);
    (tiles.template store<kTile>(out.moved[kTile], kCheckStoreStride), ...);
    (tiles.template zero<kTile>(), ...);
    (tiles.template store<kTile>(out.zeroed[kTile], sizeof(out.zeroed[kTile][0])), ...);
  }(std::make_integer_sequence<int, 8>{});
  for (int i = 0; i < kFloatChecks; ++i) check_products<false>(tiles, in.floats[i], out.floats + 4 * i);
  for (int i = 0; i < kByteChecks; ++i) check_products<true>(tiles, in.bytes[i], out.bytes + 4 * i);
}

#if defined(__x86_64__)
namespace amx {
void check_tiles(const TileCheckInputs& in, TileCheckResults& out);
}
namespace amx_emulated {
void check_tiles(const TileCheckInputs& in, TileCheckResults& out);
}
#endif

}  // namespace fastinfer::cpu
