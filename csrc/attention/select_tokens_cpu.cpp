// The score of position s is the sum over the heads h of weight_h max(q_h k_s, 0), in fp32 and in the order of the
// heads. Pieces of the positions are scored by any threads; then each query's scores are sorted as far as needed. A
// score depends on its query and its key alone, so neither the batch nor the number of threads changes the choice.
#include "attention/select_tokens.h"

#include <algorithm>
#include <bit>
#include <stdexcept>
#include <string>

#include "attention/attention_products_cpu.h"
#include "common/cpu/parallel.h"

namespace fastinfer::cpu::FASTINFER_ISA {
namespace {

constexpr int64_t kScores = 1 << 20;  // that are kept at once, unless one query has more: 4 MB
constexpr int kPieceOf = 16 * kTile;  // positions that are scored together: a query is then widened for 1024 keys

// Scores in descending order, a NaN before all, so that attention shows it; of two equal scores the earlier position
// first.
uint64_t sort_key(float score, int position) {
  const auto bits = std::bit_cast<uint32_t>(score == 0.0f ? 0.0f : score);
  const uint32_t ascending = bits >> 31 ? ~bits : bits | 0x80000000u;
  const uint32_t rank = score != score ? 0 : ~ascending;
  return static_cast<uint64_t>(rank) << 32 | static_cast<uint32_t>(position);
}

// What a token sees.
struct Sight {
  const int32_t* blocks;
  int positions;
};

Sight sight_of(const SelectTokensParams& p, int64_t token) {
  const auto* const end = p.query_start + p.seqs + 1;
  const int64_t seq = std::upper_bound(p.query_start, end, token) - p.query_start - 1;
  const int64_t positions = p.seq_lens[seq] - p.query_start[seq + 1] + token + 1;
  return {p.block_table + seq * p.max_blocks, static_cast<int>(std::max<int64_t>(positions, 0))};
}

int64_t slot_of(const SelectTokensParams& p, const Sight& sight, int position) {
  const int entry = position / p.block_size, block = sight.blocks[entry];
  if (block < 0 || block >= p.num_blocks) {
    throw std::runtime_error("select_tokens: block_table must have blocks in 0.." + std::to_string(p.num_blocks - 1) +
                             ", got " + std::to_string(block));
  }
  return int64_t{block} * p.block_size + (position - entry * p.block_size);
}

class Scorer {
 public:
  explicit Scorer(const SelectTokensParams& p) : p_(p), columns_((p.head_dim + kLanes - 1) / kLanes * kLanes) {
    q_ = scratch_array<float>(1, int64_t{p.heads} * (columns_ + kTile + 1) + kTile * columns_);
    keys_ = q_ + p.heads * columns_;
    products_ = keys_ + kTile * columns_;
    weights_ = products_ + p.heads * kTile;
    seen_ = scratch_array<Range>(2, p.heads);
    for (int j = 0; j < kTile; ++j) key_rows_[j] = keys_ + j * columns_;
  }

  // scores[begin..end - 1], and a few more up to a whole tile.
  void score(int64_t token, const Sight& sight, int begin, int end, float* scores) {
    dispatch(p_.dtype, [&]<class T>(T) { load_query<T>(token); });
    for (int tile = begin; tile < end; tile += kTile) {
      const int count = std::min(kTile, end - tile);
      dispatch(p_.key_dtype, [&]<class C>(C) { load_keys<C>(sight, tile, count); });
      std::fill_n(seen_, p_.heads, Range{0, count});
      multiply_keys<false>(q_, columns_, seen_, p_.heads, key_rows_, key_rows_, products_);
      for (int j = 0; j < kTile; j += kLanes) store(scores + tile + j, sum_heads(products_ + j));
    }
  }

 private:
  template <class T>
  void load_query(int64_t token) {
    const T* const q = static_cast<const T*>(p_.q) + token * p_.q_stride;
    for (int h = 0; h < p_.heads; ++h) widen(q + int64_t{h} * p_.head_dim, q_ + h * columns_);
    const T* const weights = static_cast<const T*>(p_.weights) + token * p_.weight_stride;
    for (int h = 0; h < p_.heads; ++h) weights_[h] = to_float(weights[h]);
  }

  template <class C>
  void load_keys(const Sight& sight, int tile, int count) {
    const C* const keys = static_cast<const C*>(p_.keys);
    for (int j = 0; j < count; ++j) widen(keys + slot_of(p_, sight, tile + j) * p_.head_dim, keys_ + j * columns_);
  }

  // One row to fp32; columns beyond head_dim become zeros.
  template <class T>
  void widen(const T* row, float* out) const {
    for_each_vector(p_.head_dim, [&](int64_t i, int64_t lanes) { store(out + i, load_lanes(row + i, lanes)); });
  }

  f32v sum_heads(const float* products) const {
    f32v sum{};
    for (int h = 0; h < p_.heads; ++h) {
      const f32v v = load(products + h * kTile);
      sum += weights_[h] * select(v < 0.0f, f32v{}, v);  // a NaN stays
    }
    return sum;
  }

  const SelectTokensParams& p_;
  const int columns_;
  float *q_, *keys_, *products_, *weights_;
  Range* seen_;
  const float* key_rows_[kTile];
};

// Writes the slots of all positions that a token sees, or of the `width` ones with the highest scores, in ascending
// order.
void choose(const SelectTokensParams& p, int64_t token, const Sight& sight, const float* scores) {
  int32_t* out = p.slots + token * p.width;
  p.lens[token] = std::min(sight.positions, p.width);
  if (sight.positions <= p.width) {
    for (int i = 0; i < sight.positions; ++i) out[i] = static_cast<int32_t>(slot_of(p, sight, i));
    return;
  }
  auto* const keys = scratch_array<uint64_t>(3, sight.positions);
  for (int i = 0; i < sight.positions; ++i) keys[i] = sort_key(scores[i], i);
  std::nth_element(keys, keys + p.width - 1, keys + sight.positions);
  const uint64_t last = keys[p.width - 1];
  for (int i = 0; i < sight.positions; ++i) {
    if (sort_key(scores[i], i) <= last) *out++ = static_cast<int32_t>(slot_of(p, sight, i));
  }
}

}  // namespace

void select_tokens(const SelectTokensParams& p) {
  const int longest = p.seqs > 0 ? *std::max_element(p.seq_lens, p.seq_lens + p.seqs) : 0;
  const bool chooses = longest > p.width;
  const int64_t stride = (int64_t{longest} + kTile - 1) / kTile * kTile, pieces = (stride + kPieceOf - 1) / kPieceOf;
  const int64_t group = chooses ? std::clamp<int64_t>(kScores / stride, 1, std::max<int64_t>(p.tokens, 1)) : p.tokens;
  float* const scores = chooses ? scratch_array<float>(0, group * stride) : nullptr;
  for (int64_t first = 0; first < p.tokens; first += group) {
    const int64_t count = std::min(group, p.tokens - first);
    if (chooses) {
      parallel_for(count * pieces, [&](int64_t begin, int64_t end) {
        Scorer scorer(p);
        for (int64_t i = begin; i < end; ++i) {
          const int64_t row = i / pieces;
          const Sight sight = sight_of(p, first + row);
          const int start = static_cast<int>(i % pieces) * kPieceOf;
          if (sight.positions <= p.width || start >= sight.positions) continue;
          scorer.score(first + row, sight, start, std::min(start + kPieceOf, sight.positions), scores + row * stride);
        }
      });
    }
    parallel_for(count, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        choose(p, first + row, sight_of(p, first + row), chooses ? scores + row * stride : nullptr);
      }
    });
  }
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
