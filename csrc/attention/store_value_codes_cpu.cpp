#include "attention/store_value_codes.h"

#include <bit>

#include "attention/store_codes_cpu.h"
#include "common/cpu/parallel.h"

namespace fastinfer::cpu::FASTINFER_ISA {
namespace {

template <class C>
void store_block(const StoreCodesParams& p, int64_t block, int head) {
  const int columns = rotated_columns(p.head_dim), words = value_code_words(p.head_dim, p.block_size);
  float* const value = scratch_array<float>(0, columns);
  int8_t* const codes = scratch_array<int8_t>(1, int64_t{kKeyCodesPerWord} * columns);
  uint32_t* out = p.codes + (block * p.heads + head) * words;
  uint32_t* scales = out + words - p.block_size;
  for (int first = 0; first < p.block_size; first += kKeyCodesPerWord, out += p.head_dim) {
    for (int token = 0; token < kKeyCodesPerWord; ++token) {
      const int64_t slot = block * p.block_size + first + token;
      load_rotated<C, kInt4ValueGroup>(p.cache, p.scale, slot * p.heads + head, p.head_dim, value);
      *scales++ = std::bit_cast<uint32_t>(round_to_levels(value, p.head_dim, codes + token * columns));
    }
    for (int channel = 0; channel < p.head_dim; ++channel) {
      uint32_t word = 0;
      for (int token = 0; token < kKeyCodesPerWord; ++token) {
        word |= static_cast<uint32_t>(codes[token * columns + channel]) << (token % 4 * 8 + token / 4 * 4);
      }
      out[channel] = word;
    }
  }
}

}  // namespace

void store_value_codes(const StoreCodesParams& p) {
  const auto run = [&]<class C>(C) {
    parallel_for(p.tokens, [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) {
        const int64_t slot = p.slot_mapping[token];
        if (slot < 0 || (slot + 1) % p.block_size != 0) continue;  // tokens of a block are written in order
        for (int head = 0; head < p.heads; ++head) store_block<C>(p, slot / p.block_size, head);
      }
    });
  };
  dispatch_cache(p, run);
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
