// A tile of a sequence's cache: where its keys and values lie, found through the block table, and their copy in fp32.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "attention/kv_int4_cpu.h"
#include "attention/paged_attention.h"
#include "common/cpu/quantize_row.h"

namespace fastinfer::cpu::FASTINFER_ISA {

inline constexpr int kTile = 64;  // positions: K or V of one tile take 16 KB of fp32 at head_dim 64

struct Range {
  int first, end;
};

// kLanes bytes with their signs.
FASTINFER_INLINE i32v load_bytes(const void* p) {
  typedef int8_t Bytes __attribute__((vector_size(kLanes)));
#if defined(FASTINFER_AVX2)
  return widen(load_as<Bytes>(p));
#else
  return __builtin_convertvector(load_as<Bytes>(p), i32v);
#endif
}

FASTINFER_INLINE f32v load(const Int8* p) {
  return to_f32(load_bytes(p));
}

// A shift puts sign, exponent and mantissa where fp32 has them; the product mends the exponent's bias and makes
// subnormals normal. (e4m3's NaN becomes 480: a store that saturates never writes it.)
FASTINFER_INLINE f32v load(const E4m3* p) {
  return (f32v)((load_bytes(p) << 20) & static_cast<int32_t>(0x87f00000)) * 0x1p120f;
}

template <class C>
inline constexpr bool kRowScales = std::is_same_v<C, Int8> || std::is_same_v<C, E4m3>;  // one scale a position
template <class C>
inline constexpr bool kGroupScales = std::is_same_v<C, Int4Pair>;

template <class C>
struct KvTile {
  using Scale = std::conditional_t<kGroupScales<C>, const Int4Scale*, float>;

  const C* keys[kTile];  // if no row sees the position, the keys of one that is seen
  const C* values[kTile];
  Scale key_scales[kTile];
  Scale value_scales[kTile];
};

// One KV head of one sequence.
template <class C>
class KvPages {
 public:
  KvPages(const PagedAttentionParams& p, int seq, int kv_head)
      : p_(p), row_(p.table_row(seq, kv_head)), kv_head_(kv_head) {}

  // Finds positions first..end - 1 of the tile that begins at `tile`.
  void find(int tile, int first, int end, KvTile<C>& found) const {
    const int64_t columns = kGroupScales<C> ? p_.head_dim / 2 : p_.head_dim;
    for (int position = first; position < end;) {
      const int entry = position / p_.block_size, offset = position - entry * p_.block_size;
      int64_t slot = block(entry) * p_.block_size + offset;
      const int run = std::min(end - position, p_.block_size - offset);
      for (int j = position - tile; j < position - tile + run; ++j, ++slot) {
        const int64_t row = slot * p_.kv_heads + kv_head_;
        found.keys[j] = static_cast<const C*>(p_.k_cache) + row * columns;
        found.values[j] = static_cast<const C*>(p_.v_cache) + row * columns;
        if constexpr (kGroupScales<C>) {
          found.key_scales[j] =
              static_cast<const Int4Scale*>(p_.k_scale) + row * int4_groups(p_.head_dim, kInt4KeyGroup);
          found.value_scales[j] =
              static_cast<const Int4Scale*>(p_.v_scale) + row * int4_groups(p_.head_dim, kInt4ValueGroup);
        } else if constexpr (kRowScales<C>) {
          found.key_scales[j] = static_cast<const float*>(p_.k_scale)[row];
          found.value_scales[j] = static_cast<const float*>(p_.v_scale)[row];
        }
      }
      position += run;
    }
    for (auto* rows : {found.keys, found.values}) {
      std::fill(rows, rows + (first - tile), rows[first - tile]);
      std::fill(rows + (end - tile), rows + kTile, rows[first - tile]);
    }
  }

  // Keys and values to fp32 [kTile, columns]; columns beyond head_dim become zeros. Values in the keys have no copy of
  // their own. `next` is the tile after this one.
  void widen(const KvTile<C>& tile, [[maybe_unused]] const KvTile<C>& next, int first, int end, int columns,
             float* keys, float* values) const {
    for (int j = first; j < end; ++j) {
      if constexpr (kGroupScales<C>) {
        __builtin_prefetch(next.keys[j]), __builtin_prefetch(next.values[j]);
        __builtin_prefetch(next.key_scales[j]), __builtin_prefetch(next.value_scales[j]);
        widen_int4<kInt4KeyGroup>(tile.keys[j], tile.key_scales[j], p_.head_dim, keys + j * columns);
        widen_int4<kInt4ValueGroup>(tile.values[j], tile.value_scales[j], p_.head_dim, values + j * columns);
      } else {
        for (int64_t i = 0; i < p_.head_dim; i += 64 / static_cast<int>(sizeof(C))) {
          __builtin_prefetch(next.keys[j] + i);
          if (!p_.values_in_keys()) __builtin_prefetch(next.values[j] + i);
        }
        for_each_vector(p_.head_dim, [&](int64_t i, int64_t lanes) {
          store(keys + j * columns + i, load_lanes(tile.keys[j] + i, lanes));
          if (!p_.values_in_keys()) store(values + j * columns + i, load_lanes(tile.values[j] + i, lanes));
        });
      }
    }
  }

 private:
  int64_t block(int entry) const {
    const int32_t block = p_.block_table[row_ * p_.max_blocks + entry];
    if (block < 0 || block >= p_.num_blocks) {
      const std::string row = p_.table_per_head ? std::to_string(row_ / p_.kv_heads) + ", " + std::to_string(kv_head_)
                                                : std::to_string(row_);
      throw std::runtime_error("paged_attention: block_table[" + row + ", " + std::to_string(entry) +
                               "] must be in 0.." + std::to_string(p_.num_blocks - 1) + ", got " +
                               std::to_string(block));
    }
    return block;
  }

  const PagedAttentionParams& p_;
  const int64_t row_;  // of the block table
  const int kv_head_;
};

}  // namespace fastinfer::cpu::FASTINFER_ISA
