// Compiled once, without fused multiply-add, which would round differently: bound by memory as it is.
#include "formats/gguf_rows.h"

#include <algorithm>
#include <array>
#include <atomic>

#include "common/cpu/parallel.h"
#include "formats/gguf_blocks_cpu.h"
#include "formats/gguf_grid_blocks_cpu.h"
#include "quant/pack_tile_cpu.h"

namespace fastinfer {
namespace {

// Calls fn with the reader of a GGUF type id; nothing happens for a type that has none.
template <class Fn>
void with_reader(int type, const Fn& fn) {
  using namespace cpu;
  switch (type) {
    case 2: return fn(FourBits<false>{});  // Q4_0
    case 3: return fn(FourBits<true>{});   // Q4_1
    case 6: return fn(FiveBits<false>{});  // Q5_0
    case 7: return fn(FiveBits<true>{});   // Q5_1
    case 8: return fn(Q8_0{});
    case 10: return fn(Joined<Q2_K>{});
    case 11: return fn(Joined<Q3_K>{});
    case 12: return fn(Q4_K{});
    case 13: return fn(Q5_K{});
    case 14: return fn(Joined<Q6_K>{});
    case 16: return fn(IQ2_XXS{});
    case 17: return fn(Joined<IQ2_XS>{});
    case 18: return fn(IQ3_XXS{});
    case 19: return fn(IQ1_S{});
    case 20: return fn(FourBits<false>{});  // IQ4_NL
    case 21: return fn(IQ3_S{});
    case 22: return fn(Joined<IQ2_S>{});
    case 23: return fn(IQ4_XS{});
    case 29: return fn(Joined<IQ1_M>{});
    case 34: return fn(TQ1_0{});
    case 35: return fn(TQ2_0{});
    case 39: return fn(MXFP4{});
    case 41: return fn(Q1_0{});
    case 42: return fn(Q2_0{});
    default: return;
  }
}

template <class Type>
constexpr int packed_bits = Type::kBits;
template <bool kMins>
constexpr int packed_bits<cpu::FiveBits<kMins> > = 5;

// The same for a type whose blocks store two-level scales that the CPU's products take.
template <class Fn>
void with_two_level(int type, const Fn& fn) {
  if (type == 12) fn(cpu::Q4_K{});
  if (type == 13) fn(cpu::Q5_K{});
  if (type == 14) fn(cpu::Q6_K{});
}

}  // namespace

const GGUFBlock* gguf_block(int type) {
  static const auto blocks = [] {
    std::array<GGUFBlock, 256> all{};
    for (int id = 0; id < 256; ++id) {
      with_reader(id, [&]<class Type>(Type) {
        all[id] = {Type::kInputs, Type::kBytes, Type::kBits, Type::kHasMins, Type::kGroupsOf16, 0, packed_bits<Type>};
        with_two_level(id, [&]<class Stored>(Stored) { all[id].two_level_bits = Stored::kTwoLevelBits; });
      });
    }
    return all;
  }();
  return type >= 0 && type < 256 && blocks[type].inputs > 0 ? &blocks[type] : nullptr;
}

namespace cpu {
namespace {

// Inputs that are unpacked before they are packed: 16 rows of them stay in the first-level cache.
constexpr int64_t kSegment = 256, kGroup = 32;

// Unpacks `count` inputs of a row, from input `begin`, which is the first of a block.
template <class Scale>
bool read_row(const GGUFRowsParams& p, int64_t row, int64_t begin, int64_t count, uint8_t* q, Scale* scales,
              Scale* mins) {
  bool fits = true;
  with_reader(p.types[row], [&]<class Type>(Type) {
    const uint8_t* block = p.file + p.offsets[row] + begin / Type::kInputs * Type::kBytes;
    for (int64_t i = 0; i < count; i += Type::kInputs, block += Type::kBytes) {
      Scale* const min = mins == nullptr ? nullptr : mins + i / kGroup;
      fits &= Type::read(block, q + i, scales + i / kGroup, min);
    }
  });
  return fits;
}

template <class Scale>
bool unpack_row(const GGUFRowsParams& p, int64_t row) {
  const int64_t groups = p.k / kGroup;
  auto *scales = static_cast<Scale*>(p.scales), *mins = static_cast<Scale*>(p.mins);
  return read_row(p, row, 0, p.k, static_cast<uint8_t*>(p.q) + row * p.k, scales + row * groups,
                  mins == nullptr ? nullptr : mins + row * groups);
}

template <class Scale>
bool pack_rows_of_tile(const GGUFRowsParams& p, int64_t tile) {
  constexpr int64_t kGroups = kSegment / kGroup;
  const int64_t first = tile * kTileRows, rows = std::min<int64_t>(p.n - first, kTileRows), groups = p.k / kGroup;
  alignas(64) uint8_t q[kTileRows][kSegment];
  Scale scales[kTileRows][kGroups]{}, mins[kTileRows][kGroups]{};
  bool fits = true;
  for (int64_t begin = 0; begin < p.k; begin += kSegment) {
    const int64_t count = std::min(kSegment, p.k - begin);
    for (int64_t row = 0; row < rows; ++row) {
      fits &= read_row(p, first + row, begin, count, q[row], scales[row], mins[row]);
      // Without minimums the integers are -16..15, and packed ones have an offset of 16.
      for (int64_t i = 0; p.bits == 5 && p.mins == nullptr && i < count; ++i) q[row][i] += 16;
    }
    const int64_t inputs = tile * kTileRows * p.k + begin * kTileRows;  // that come before these in the packed weight
    auto* out = static_cast<uint8_t*>(p.q) + inputs * p.bits / 8;
    if (p.bits == 4) pack_tile<4>(q[0], kSegment, rows, count, out);
    if (p.bits == 5) pack_tile<5>(q[0], kSegment, rows, count, out);
    if (p.bits == 8) pack_tile<8>(q[0], kSegment, rows, count, out);
    const int64_t at = (tile * groups + begin / kGroup) * kTileRows;
    for (int64_t i = 0; i < count / kGroup * kTileRows; ++i) {
      static_cast<Scale*>(p.scales)[at + i] = scales[i % kTileRows][i / kTileRows];
      if (p.mins != nullptr) static_cast<Scale*>(p.mins)[at + i] = mins[i % kTileRows][i / kTileRows];
    }
  }
  return fits;
}

template <class Type>
void pack_two_level_tile(const GGUFTwoLevelParams& p, int64_t tile) {
  constexpr int64_t kBlock = kTwoLevelInputs, kGroups = Type::kTwoLevelGroups, kBytes = (2 + kGroups) * kTileRows;
  const int64_t first = tile * kTileRows, rows = std::min<int64_t>(p.n - first, kTileRows), blocks = p.k / kBlock;
  alignas(64) uint8_t q[kTileRows][kBlock];
  TwoLevelNumbers scales[kTileRows]{}, mins[kTileRows]{};
  const auto write = [&](const TwoLevelNumbers* numbers, uint8_t* out) {
    for (int64_t row = 0; row < kTileRows; ++row) {
      std::memcpy(out + 2 * row, &numbers[row].factor, 2);
      for (int64_t group = 0; group < kGroups; ++group) {
        out[(2 + group) * kTileRows + row] = static_cast<uint8_t>(numbers[row].integers[group]);
      }
    }
  };
  for (int64_t block = 0; block < blocks; ++block) {
    for (int64_t row = 0; row < rows; ++row) {
      Type::read_two_level(p.file + p.offsets[first + row] + block * Type::kBytes, q[row], scales + row, mins + row);
    }
    const int64_t at = tile * blocks + block;
    constexpr int kBits = Type::kTwoLevelBits;
    pack_tile<kBits>(q[0], kBlock, rows, kBlock, static_cast<uint8_t*>(p.q) + at * kBlock * kTileRows * kBits / 8);
    write(scales, p.scales + at * kBytes);
    if (p.mins != nullptr) write(mins, p.mins + at * kBytes);
  }
}

}  // namespace

void pack_gguf_two_level(const GGUFTwoLevelParams& p) {
  with_two_level(p.type, [&]<class Type>(Type) {
    parallel_for((p.n + kTileRows - 1) / kTileRows, [&](int64_t begin, int64_t end) {
      for (int64_t tile = begin; tile < end; ++tile) pack_two_level_tile<Type>(p, tile);
    });
  });
}

bool unpack_gguf_rows(const GGUFRowsParams& p) {
  std::atomic<bool> fits{true};
  const auto run = [&]<class Scale>(Scale) {
    const int64_t items = p.packed ? (p.n + kTileRows - 1) / kTileRows : p.n;
    parallel_for(items, [&](int64_t begin, int64_t end) {
      bool all = true;
      for (int64_t i = begin; i < end; ++i) all &= p.packed ? pack_rows_of_tile<Scale>(p, i) : unpack_row<Scale>(p, i);
      if (!all) fits = false;
    });
  };
  p.scale_dtype == DType::kFloat16 ? run(Float16{}) : run(float{});
  return fits;
}

void dequantize_gguf_rows(const GGUFValuesParams& p) {
  parallel_for(p.n, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      with_reader(p.types[row], [&]<class Type>(Type) {
        if constexpr (Type::kGroupsOf16) {
          const uint8_t* block = p.file + p.offsets[row];
          for (int64_t i = 0; i < p.k; i += Type::kInputs, block += Type::kBytes) {
            Type::dequantize(block, p.values + row * p.k + i);
          }
        }
      });
    }
  });
}

}  // namespace cpu
}  // namespace fastinfer
