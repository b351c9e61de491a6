// The lanes of a vector are the tokens of a page: a word of each token is eight codes, whose products with eight
// elements of the rounded query are integers, exact in any order.
//
// The query heads that share a KV head read the same pages, and their logits differ in size. So each head's estimates
// become probabilities of the tokens, and a page's weight is their sum over its tokens and the heads.
#include "attention/select_pages.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <numbers>
#include <stdexcept>
#include <string>
#include <utility>

#include "attention/attention_softmax_cpu.h"
#include "attention/key_codes_cpu.h"
#include "common/cpu/dot.h"
#include "common/cpu/parallel.h"
#include "common/cpu/quantize_row.h"
#include "common/cpu/reduce.h"

namespace fastinfer::cpu::FASTINFER_ISA {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int kHeadsAtOnce = 4;       // that share a page's unpacked codes
constexpr int kPagesAtOnce = 4;       // whose weights are summed together
constexpr int kBytesAhead = 1 << 12;  // that are prefetched

// Pages in descending order of their weights, which are not negative, and of two equal weights the earlier page first.
uint64_t sort_key(float weight, int page) {
  return static_cast<uint64_t>(~std::bit_cast<uint32_t>(weight)) << 32 | static_cast<uint32_t>(page);
}

// Adds the products of four codes of each lane with the four bytes at x.
FASTINFER_INLINE i32v add_products(i32v sum, u8v codes, const int8_t* x) {
#if defined(FASTINFER_AVX512_VNNI)
  return dpbusd(sum, codes, x);
#else
  return sum + madd(maddubs(codes, (i8v)broadcast_word(x)), i16v{} + int16_t{1});
#endif
}

// One KV head.
class PageSelection {
 public:
  PageSelection(const SelectPagesParams& p, int kv_head)
      : p_(p),
        group_(p.q_heads / p.kv_heads),
        kv_head_(kv_head),
        words_(key_code_words(p.head_dim)),
        halves_(2 * p.block_size == kLanes),
        vectors_((p.block_size + kLanes - 1) / kLanes),
        pages_ahead_(std::max(1, kBytesAhead / (words_ * p.block_size * static_cast<int>(sizeof(uint32_t))))) {
    const int64_t pages = (p.max_blocks + kPagesAtOnce - 1) / kPagesAtOnce * kPagesAtOnce;
    stride_ = halves_ ? pages / 2 * kLanes : pages * vectors_ * kLanes;
    q_ = scratch_array<Int8>(0, group_ * p.head_dim);
    logits_ = scratch_array<float>(1, group_ * stride_ + 2 * pages + rotated_columns(p.head_dim));
    weights_ = logits_ + group_ * stride_;
    sums_ = weights_ + pages;
    row_ = sums_ + pages;
    queries_ = scratch_array<Query>(2, group_);
    keys_ = scratch_array<uint64_t>(3, p.max_blocks);
  }

  // Writes `width` of the first `pages` blocks of a row of the block table.
  void choose(int64_t token, const int32_t* blocks, int pages, int32_t* out) {
    dispatch(p_.dtype, [&]<class T>(T) { load_queries<T>(token); });
    const int end = pages - kLastPages, n = end - kFirstPages, count = p_.width - kFirstPages - kLastPages;
    estimate(blocks + kFirstPages, n);
    std::fill_n(weights_, n, 0.0f);
    for (int r = 0; r < group_; ++r) add_weights(logits_ + r * stride_, n);
    for (int i = 0; i < n; ++i) keys_[i] = sort_key(weights_[i], kFirstPages + i);
    std::nth_element(keys_, keys_ + count - 1, keys_ + n);
    const uint64_t last = keys_[count - 1];
    *out++ = blocks[0];
    for (int i = 0; i < n; ++i) {
      if (sort_key(weights_[i], kFirstPages + i) <= last) *out++ = blocks[kFirstPages + i];
    }
    std::copy_n(blocks + end, kLastPages, out);
  }

 private:
  struct Query {
    int32_t offset;  // taken from twice the sum of products with codes, of which each stands for 7.5 less
    float factor;    // of logits to the base 2
  };

  template <class T>
  void load_queries(int64_t token) {
    const T* const q = static_cast<const T*>(p_.q) + token * p_.q_stride + int64_t{kv_head_} * group_ * p_.head_dim;
    for (int r = 0; r < group_; ++r) {
      for_each_vector(p_.head_dim, [&](int64_t i, int64_t lanes) {
        store(row_ + i, load_lanes(q + r * p_.head_dim + i, lanes));  // zeros beyond head_dim
      });
      rotate(row_, p_.head_dim);
      Int8* const bytes = q_ + r * p_.head_dim;
      const float scale = quantize_row(row_, p_.head_dim, bytes);
      int32_t sum = 0;
      for (int i = 0; i < p_.head_dim; ++i) sum += bytes[i].value;
      queries_[r] = {
          static_cast<int32_t>(2 * kLargestKeyLevel) * sum,
          p_.scale * std::numbers::log2e_v<float> * scale / (2.0f * static_cast<float>(hadamard_size(p_.head_dim)))};
    }
  }

  const uint32_t* codes(int32_t block) const {
    if (block < 0 || block >= p_.num_blocks) {
      throw std::runtime_error("select_pages: block_table must have blocks in 0.." + std::to_string(p_.num_blocks - 1) +
                               ", got " + std::to_string(block));
    }
    return p_.codes + (int64_t{block} * p_.kv_heads + kv_head_) * words_ * p_.block_size;
  }

  // A page's codes, while those of one that comes later are fetched: pages lie anywhere.
  const uint32_t* take_codes(const int32_t* blocks, int pages, int page) const {
    if (page + pages_ahead_ < pages) {
      const uint32_t* const later = codes(blocks[page + pages_ahead_]);
      for (int i = 0; i < words_ * p_.block_size; i += 64 / static_cast<int>(sizeof(uint32_t))) {
        __builtin_prefetch(later + i);
      }
    }
    return codes(blocks[page]);
  }

  // logits_[group][stride_]: of each page's tokens; -infinity in lanes without a token.
  void estimate(const int32_t* blocks, int pages) {
    float* out = logits_;
    const int size = p_.block_size;
    if (halves_) {
      for (int page = 0; page < pages; page += 2, out += kLanes) {
        const uint32_t* const first = take_codes(blocks, pages, page);
        if (page + 1 < pages) {
          const uint32_t* const second = take_codes(blocks, pages, page + 1);
          multiply([&](int word) { return join(first + word * size, second + word * size); }, out);
        } else {
          multiply([&](int word) { return join(first + word * size, first + word * size); }, out);
          clear(out, kLanes / 2);
        }
      }
    } else {
      for (int page = 0; page < pages; ++page) {
        const uint32_t* const codes = take_codes(blocks, pages, page);
        int first = 0;
        for (; first + kLanes <= size; first += kLanes, out += kLanes) {
          multiply([&](int word) { return load_as<u32v>(codes + word * size + first); }, out);
        }
        if (const int lanes = size - first; lanes > 0) {
          multiply([&](int word) { return load_partial_words(codes + word * size + first, lanes); }, out);
          clear(out, lanes);
          out += kLanes;
        }
      }
    }
    const int64_t end = out - logits_;
    for (int r = 0; r < group_; ++r) {  // of the pages that complete the last kPagesAtOnce
      std::fill_n(logits_ + r * stride_ + end, std::min<int64_t>(stride_ - end, kPagesAtOnce * vectors_ * kLanes),
                  -kInfinity);
    }
  }

  // The lanes from `lanes` on have no tokens.
  void clear(float* out, int lanes) const {
    for (int r = 0; r < group_; ++r) std::fill(out + r * stride_ + lanes, out + r * stride_ + kLanes, -kInfinity);
  }

  static u32v load_partial_words(const uint32_t* p, int lanes) {
    return (u32v)load_partial(reinterpret_cast<const float*>(p), lanes);
  }

  // kLanes / 2 words each.
  FASTINFER_INLINE static u32v join(const uint32_t* first, const uint32_t* second) {
    typedef uint32_t Half __attribute__((vector_size(kLanes * 2)));
    return [&]<int... kIndices>(std::integer_sequence<int, kIndices...>) {
      return __builtin_shufflevector(load_as<Half>(first), load_as<Half>(second), kIndices...);
    }(std::make_integer_sequence<int, kLanes>{});
  }

  // One vector of tokens, whose words words(i) loads, for each query head.
  template <class Words>
  FASTINFER_INLINE void multiply(const Words& words, float* out) const {
    int head = 0;
    for (; head + kHeadsAtOnce <= group_; head += kHeadsAtOnce) multiply<kHeadsAtOnce>(words, head, out);
    switch (group_ - head) {
      case 1: return multiply<1>(words, head, out);
      case 2: return multiply<2>(words, head, out);
      case 3: return multiply<3>(words, head, out);
      default: return;
    }
  }

  template <int kHeads, class Words>
  FASTINFER_INLINE void multiply(const Words& words, int head, float* out) const {
    i32v sums[kHeads] = {};
    const int8_t* const q = &q_[head * p_.head_dim].value;
    for (int word = 0; word < words_ - 1; ++word) {
      const u8v codes = (u8v)words(word), low = low_nibbles(codes), high = high_nibbles(codes);
#pragma GCC unroll 4
      for (int r = 0; r < kHeads; ++r) {
        const int8_t* const x = q + r * p_.head_dim + word * kKeyCodesPerWord;
        sums[r] = add_products(add_products(sums[r], low, x), high, x + kKeyCodesPerWord / 2);
      }
    }
    const f32v scales = (f32v)words(words_ - 1);
#pragma GCC unroll 4
    for (int r = 0; r < kHeads; ++r) {
      const Query& query = queries_[head + r];
      store(out + (head + r) * stride_, to_f32(2 * sums[r] - query.offset) * (scales * query.factor));
    }
  }

  // Adds a head's probabilities to the pages' weights. The weight of a page with an infinity or a NaN is infinite, so
  // that attention shows it, and counts for no other.
  void add_weights(const float* logits, int pages) {
    const int64_t size = halves_ ? (pages + 1) / 2 * kLanes : int64_t{pages} * vectors_ * kLanes;
    f32v largest = broadcast(-kInfinity);
    for (int64_t i = 0; i < size; i += kLanes) {
      const f32v v = load(logits + i);
      largest = max(select(v < kInfinity, v, largest), largest);
    }
    const float top = std::max(max_of_lanes(largest), -std::numeric_limits<float>::max());
    const auto exponentials = [&](int64_t i) __attribute__((always_inline)) {
      const f32v v = load(logits + i);
      return select(v < kInfinity, exp2(v - top), broadcast(kInfinity));
    };
    f32x4 sums{};
    for (int page = 0; page < pages; page += kPagesAtOnce) {
      f32v parts[kPagesAtOnce];
      if (halves_) {
        for (int j = 0; j < kPagesAtOnce; j += 2) {
          const f32v both = exponentials(int64_t{page + j} / 2 * kLanes);
          parts[j] = select(first_half(), both, f32v{}), parts[j + 1] = select(first_half(), f32v{}, both);
        }
      } else {
        for (int j = 0; j < kPagesAtOnce; ++j) {
          const int64_t first = int64_t{page + j} * vectors_ * kLanes;
          parts[j] = exponentials(first);
          for (int i = 1; i < vectors_; ++i) parts[j] += exponentials(first + i * kLanes);
        }
      }
      const f32x4 four = reduce_add(parts[0], parts[1], parts[2], parts[3]);
      store_as(sums_ + page, four);
      sums += four < kInfinity ? four : f32x4{};
    }
    const float sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    const float inverse = 1.0f / std::max(sum, std::numeric_limits<float>::min());
    for (int page = 0; page < pages; ++page) weights_[page] += sums_[page] * inverse;
  }

  FASTINFER_INLINE static i32v first_half() {
    i32v mask{};
    for (int i = 0; i < kLanes / 2; ++i) mask[i] = -1;
    return mask;
  }

  const SelectPagesParams& p_;
  const int group_, kv_head_, words_;
  const bool halves_;  // whether a vector holds two pages
  const int vectors_;  // of a page
  const int pages_ahead_;
  int64_t stride_;  // of a head's logits
  Int8* q_;
  float *logits_, *weights_, *sums_, *row_;
  Query* queries_;
  uint64_t* keys_;
};

void select_of_head(const SelectPagesParams& p, int64_t token, int head) {
  const int seq =
      static_cast<int>(std::upper_bound(p.query_start, p.query_start + p.seqs + 1, token) - p.query_start) - 1;
  const int position = p.seq_lens[seq] - p.query_start[seq + 1] + static_cast<int>(token);
  const int pages = position < 0 ? 0 : position / p.block_size + 1;
  const int32_t* const blocks = p.block_table + seq * p.max_blocks;
  int32_t* const out = p.pages + (token * p.kv_heads + head) * p.width;
  if (pages <= p.width) {
    std::copy_n(blocks, pages, out);
  } else {
    PageSelection(p, head).choose(token, blocks, pages, out);
  }
  if (head == 0) p.lens[token] = std::max(0, position + 1 - std::max(0, pages - p.width) * p.block_size);
}

}  // namespace

void select_pages(const SelectPagesParams& p) {
  parallel_for(p.tokens * p.kv_heads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) select_of_head(p, i / p.kv_heads, static_cast<int>(i % p.kv_heads));
  });
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
