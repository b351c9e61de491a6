#include <bit>

#include "attention/key_codes_cpu.h"
#include "attention/kv_tile_cpu.h"
#include "attention/store_key_codes.h"
#include "common/cpu/parallel.h"

namespace fastinfer::cpu::FASTINFER_ISA {
namespace {

// One key to fp32 [rotated_columns].
template <class C>
void widen_key(const StoreKeyCodesParams& p, int64_t row, float* out) {
  if constexpr (kGroupScales<C>) {
    const int groups = int4_groups(p.head_dim, kInt4KeyGroup);
    widen_int4<kInt4KeyGroup>(static_cast<const C*>(p.k_cache) + row * p.head_dim / 2,
                              static_cast<const Int4Scale*>(p.k_scale) + row * groups, p.head_dim, out);
  } else {
    const float scale = kRowScales<C> ? static_cast<const float*>(p.k_scale)[row] : 1.0f;
    const C* const key = static_cast<const C*>(p.k_cache) + row * p.head_dim;
    for_each_vector(p.head_dim, [&](int64_t i, int64_t lanes) { store(out + i, load_lanes(key + i, lanes) * scale); });
  }
  std::fill(out + p.head_dim, out + rotated_columns(p.head_dim), 0.0f);
}

template <class C>
void store_codes(const StoreKeyCodesParams& p, int64_t slot, int head) {
  const int columns = rotated_columns(p.head_dim), words = key_code_words(p.head_dim);
  float* const key = scratch_array<float>(0, columns);
  widen_key<C>(p, slot * p.heads + head, key);
  rotate(key, p.head_dim);

  const RowScale level = row_scale(largest_magnitude(key, p.head_dim), kLargestKeyLevel);
  int8_t* const codes = scratch_array<int8_t>(1, columns);
  for (int i = 0; i < columns; i += kLanes) {
    // From 0.5 upwards, where conversion rounds down.
    const f32v v = level.inverse == 0.0f ? f32v{} : load(key + i) * level.inverse;
    store_bytes(codes + i, __builtin_convertvector(v + (kLargestKeyLevel + 0.5f), i32v));
  }
  uint32_t* out = p.codes + (slot / p.block_size * p.heads + head) * words * p.block_size + slot % p.block_size;
  for (int i = 0; i < p.head_dim; i += kKeyCodesPerWord, out += p.block_size) {
    uint64_t eight;
    std::memcpy(&eight, codes + i, sizeof eight);
    *out = static_cast<uint32_t>(eight) | static_cast<uint32_t>(eight >> 32) << 4;
  }
  *out = std::bit_cast<uint32_t>(level.scale);
}

}  // namespace

void store_key_codes(const StoreKeyCodesParams& p) {
  const auto run = [&]<class C>(C) {
    parallel_for(p.tokens, [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) {
        const int64_t slot = p.slot_mapping[token];
        if (slot < 0) continue;
        for (int head = 0; head < p.heads; ++head) store_codes<C>(p, slot, head);
      }
    });
  };
  switch (p.quantization) {
    case CacheQuantization::kInt8: return run(Int8{});
    case CacheQuantization::kFp8: return run(E4m3{});
    case CacheQuantization::kInt4: return run(Int4Pair{});
    default: dispatch(p.cache_dtype, run);
  }
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
