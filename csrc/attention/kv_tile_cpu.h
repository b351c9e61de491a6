// A tile of a sequence's cache: where its keys and values lie, found through the block table, and their copy in fp32.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <string>

#include "attention/paged_attention.h"
#include "fused/quantize_row_cpu.h"

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
struct KvTile {
  const C* keys[kTile];  // where nobody sees the position, those of one that is seen
  const C* values[kTile];
  float key_scales[kTile];
  float value_scales[kTile];
};

// One KV head of one sequence.
template <class C>
class KvPages {
 public:
  KvPages(const PagedAttentionParams& p, int seq, int kv_head) : p_(p), seq_(seq), kv_head_(kv_head) {}

  // Finds positions first..end - 1 of the tile that begins at `tile`.
  void find(int tile, int first, int end, KvTile<C>& found) const {
    const bool quantized = p_.quantization != CacheQuantization::kNone;
    const int64_t row = static_cast<int64_t>(p_.kv_heads) * p_.head_dim;
    for (int position = first; position < end;) {
      const int entry = position / p_.block_size, offset = position - entry * p_.block_size;
      int64_t slot = block(entry) * p_.block_size + offset;
      const int run = std::min(end - position, p_.block_size - offset);
      for (int j = position - tile; j < position - tile + run; ++j, ++slot) {
        const int64_t at = slot * row + static_cast<int64_t>(kv_head_) * p_.head_dim;
        found.keys[j] = static_cast<const C*>(p_.k_cache) + at;
        found.values[j] = static_cast<const C*>(p_.v_cache) + at;
        if (quantized) {
          found.key_scales[j] = p_.k_scale[slot * p_.kv_heads + kv_head_];
          found.value_scales[j] = p_.v_scale[slot * p_.kv_heads + kv_head_];
        }
      }
      position += run;
    }
    for (auto* rows : {found.keys, found.values}) {
      std::fill(rows, rows + (first - tile), rows[first - tile]);
      std::fill(rows + (end - tile), rows + kTile, rows[first - tile]);
    }
  }

  // Keys and values to fp32 [kTile, columns]; columns beyond head_dim become zeros.
  void widen(const KvTile<C>& tile, int first, int end, int columns, float* keys, float* values) const {
    for (int j = first; j < end; ++j) {
      for_each_vector(p_.head_dim, [&](int64_t i, int64_t lanes) {
        store(keys + j * columns + i, load_lanes(tile.keys[j] + i, lanes));
        store(values + j * columns + i, load_lanes(tile.values[j] + i, lanes));
      });
    }
  }

 private:
  int64_t block(int entry) const {
    const int32_t block = p_.block_table[seq_ * p_.max_blocks + entry];
    if (block < 0 || block >= p_.num_blocks) {
      throw std::runtime_error("paged_attention: block_table[" + std::to_string(seq_) + ", " + std::to_string(entry) +
                               "] must be in 0.." + std::to_string(p_.num_blocks - 1) + ", got " +
                               std::to_string(block));
    }
    return block;
  }

  const PagedAttentionParams& p_;
  const int seq_, kv_head_;
};

}  // namespace fastinfer::cpu::FASTINFER_ISA
