#include <bit>

#include "attention/store_codes_cpu.h"
#include "attention/store_key_codes.h"
#include "common/cpu/parallel.h"

namespace fastinfer::cpu::FASTINFER_ISA {
namespace {

template <class C>
void store_codes(const StoreCodesParams& p, int64_t slot, int head) {
  const int columns = rotated_columns(p.head_dim), words = key_code_words(p.head_dim);
  float* const key = scratch_array<float>(0, columns);
  load_rotated<C, kInt4KeyGroup>(p.cache, p.scale, slot * p.heads + head, p.head_dim, key);
  int8_t* const codes = scratch_array<int8_t>(1, columns);
  const float scale = round_to_levels(key, p.head_dim, codes);
  uint32_t* out = p.codes + (slot / p.block_size * p.heads + head) * words * p.block_size + slot % p.block_size;
  for (int i = 0; i < p.head_dim; i += kKeyCodesPerWord, out += p.block_size) {
    uint64_t eight;
    std::memcpy(&eight, codes + i, sizeof eight);
    *out = static_cast<uint32_t>(eight) | static_cast<uint32_t>(eight >> 32) << 4;
  }
  *out = std::bit_cast<uint32_t>(scale);
}

}  // namespace

void store_key_codes(const StoreCodesParams& p) {
  const auto run = [&]<class C>(C) {
    parallel_for(p.tokens, [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) {
        const int64_t slot = p.slot_mapping[token];
        if (slot < 0) continue;
        for (int head = 0; head < p.heads; ++head) store_codes<C>(p, slot, head);
      }
    });
  };
  dispatch_cache(p, run);
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
