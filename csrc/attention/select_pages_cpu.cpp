// The lanes of a vector are the tokens of a page: a word of each token is eight codes, whose products with eight
// elements of the rounded query are integers, exact in any order.
//
// The tokens of a row and the query heads that share a KV head read the same pages, and their logits differ in size. So
// each head's estimates become probabilities of the tokens, and a page's weight is their sum over its tokens, the heads
// and the row's tokens.
//
// With codes of values the probabilities also weigh the values of the pages that are not chosen: there the lanes are
// channels, and a word has the codes of eight tokens.
#include "attention/select_pages.h"

#include <algorithm>
#include <bit>
#include <cmath>
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
constexpr int kRowsAtOnce = 8;        // query heads of tokens that share a page's unpacked codes
constexpr int kPagesAtOnce = 4;       // whose weights are summed together
constexpr int kBytesAhead = 1 << 12;  // that are prefetched
constexpr int kValuePagesAhead = 12;  // whose values' codes are prefetched

// Pages that are not chosen and have less than a page's share of this part of a query head's attention count nothing.
constexpr float kNegligible = 0x1p-6f;

constexpr float kSmallest = 1e-30f;  // of weights whose reciprocal is used

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
        most_rows_((p.row_start != nullptr ? (p.block_size + kQueryStride - 1) / kQueryStride : 1) * group_),
        words_(key_code_words(p.head_dim)),
        halves_(2 * p.block_size == kLanes),
        vectors_((p.block_size + kLanes - 1) / kLanes),
        pages_ahead_(std::max(1, kBytesAhead / (words_ * p.block_size * static_cast<int>(sizeof(uint32_t))))) {
    const int64_t pages = (p.max_blocks + kPagesAtOnce - 1) / kPagesAtOnce * kPagesAtOnce;
    stride_ = halves_ ? pages / 2 * kLanes : pages * vectors_ * kLanes;
    q_ = scratch_array<Int8>(0, most_rows_ * p.head_dim);
    kept_rows_ = p.value_codes != nullptr ? most_rows_ : std::min(most_rows_, kRowsAtOnce);
    columns_ = rotated_columns(p.head_dim);
    pages_stride_ = pages;
    logits_ = scratch_array<float>(1, kept_rows_ * (stride_ + pages) + pages + columns_);
    sums_ = logits_ + kept_rows_ * stride_;
    weights_ = sums_ + kept_rows_ * pages;
    row_ = weights_ + pages;
    queries_ = scratch_array<Query>(2, most_rows_);
    numbers_ = scratch_array<int32_t>(3, p.max_blocks + kLanes);
    if (p.value_codes != nullptr) {
      rests_ = scratch_array<Rest>(4, group_);
      bytes_stride_ = (p.block_size + kLanes - 1) / kLanes * kLanes;
      bytes_ = scratch_array<int8_t>(5, group_ * bytes_stride_);
      results_ = scratch_array<float>(6, group_ * columns_ + p.block_size + kLanes);
      row_weights_ = results_ + group_ * columns_;
    }
  }

  // Writes the chosen ones of the `pages` first blocks of a row of the block table, for the tokens begin..end - 1, of
  // which the last one has this position. Returns their number.
  int choose(int64_t begin, int64_t end, int position, const int32_t* blocks, int pages, int32_t* out) {
    int rows = 0;
    for (int64_t token = end - 1; token >= begin; token -= kQueryStride, rows += group_) {
      dispatch(p_.dtype, [&]<class T>(T) { load_queries<T>(token, rows); });
    }
    std::fill_n(weights_, pages, 0.0f);
    for (int first = 0; first < rows; first += kRowsAtOnce) {
      const int count = std::min(kRowsAtOnce, rows - first), kept = first % kept_rows_;
      estimate(blocks, pages, first, count, logits_ + kept * stride_);
      for (int r = 0; r < count; ++r) {
        hide(kept + r, position + 1 - (first + r) / group_ * kQueryStride, pages);
        add_weights(kept + r, pages);
      }
    }
    const int limit = find_limit(pages, kSumOfWeights / static_cast<float>(rows));
    const int32_t* const first = out;
    for (int page = 0; page < pages; ++page) {
      if (is_chosen(page, pages, limit)) *out++ = blocks[page];
    }
    if (p_.value_codes != nullptr) {
      dispatch(p_.dtype, [&]<class T>(T) { attend_to_rest<T>(begin, blocks, pages, limit); });
    }
    return static_cast<int>(out - first);
  }

 private:
  struct Query {
    int32_t offset;  // taken from twice the sum of products with codes, of which each stands for 7.5 less
    float factor;    // of logits to the base 2
  };

  // Of one query head.
  struct Rest {
    f32v weights;      // of the tokens of all pages that are not chosen, lane by lane: a code stands for 7.5 less
    float top;         // the largest estimate to the base 2
    float factor;      // of a page's bytes
    float mass;        // of all pages that are not chosen
    float negligible;  // mass of a page that counts nothing
  };

  static bool is_always_read(int page, int pages) {
    return page < kFirstPages || page >= pages - kLastPages;
  }

  bool is_chosen(int page, int pages, int limit) const {
    return is_always_read(page, pages) || weights_[page] == kInfinity || numbers_[page] >= limit;
  }

  // The largest number from which on pages have the wanted weight, together with those that are read in any case.
  int find_limit(int pages, float unit) {
    int64_t sum = 0, present = 0;
    for (int page = 0; page < pages; ++page) {
      const int number = weights_[page] < kInfinity ? static_cast<int>(weights_[page] * unit) : 0;
      sum += number;
      present += is_always_read(page, pages) ? number : 0;
      numbers_[page] = is_always_read(page, pages) ? 0 : number;
    }
    std::fill_n(numbers_ + pages, kLanes, 0);
    const int64_t wanted = wanted_weight(sum, p_.share) - present;
    if (wanted <= 0) return std::numeric_limits<int>::max();
    int limit = 0;
    for (int bit = 1 << 30; bit > 0; bit /= 2) {
      if (sum_from(limit + bit, pages) >= wanted) limit += bit;
    }
    return std::max(limit, 1);
  }

  // The sum of the numbers that are at least `limit`.
  int sum_from(int limit, int pages) const {
    i32v sum{};
    for (int page = 0; page < pages; page += kLanes) {
      const i32v own = load_as<i32v>(numbers_ + page);
      sum += own >= limit ? own : i32v{};
    }
    int total = 0;
    for (int lane = 0; lane < kLanes; ++lane) total += sum[lane];
    return total;
  }

  // Hides the positions from `first` on, which lie in the last pages, from a row.
  void hide(int row, int first, int pages) const {
    for (int position = first; position < pages * p_.block_size; ++position) {
      const int64_t place =
          halves_ ? position : int64_t{position / p_.block_size} * vectors_ * kLanes + position % p_.block_size;
      logits_[row * stride_ + place] = -kInfinity;
    }
  }

  // Of a token's query heads, whose first one becomes this row.
  template <class T>
  void load_queries(int64_t token, int row) {
    const T* const q = static_cast<const T*>(p_.q) + token * p_.q_stride + int64_t{kv_head_} * group_ * p_.head_dim;
    for (int r = 0; r < group_; ++r) {
      for_each_vector(p_.head_dim, [&](int64_t i, int64_t lanes) {
        store(row_ + i, load_lanes(q + r * p_.head_dim + i, lanes));  // zeros beyond head_dim
      });
      rotate(row_, p_.head_dim);
      Int8* const bytes = q_ + (row + r) * p_.head_dim;
      const float scale = quantize_row(row_, p_.head_dim, bytes);
      int32_t sum = 0;
      for (int i = 0; i < p_.head_dim; ++i) sum += bytes[i].value;
      queries_[row + r] = {
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

  // logits[count][stride_]: of each page's tokens, for the rows from `row` on; -infinity in lanes without a token.
  void estimate(const int32_t* blocks, int pages, int row, int count, float* const logits) {
    float* out = logits;
    const int size = p_.block_size;
    if (halves_) {
      for (int page = 0; page < pages; page += 2, out += kLanes) {
        const uint32_t* const first = take_codes(blocks, pages, page);
        const uint32_t* const second = page + 1 < pages ? take_codes(blocks, pages, page + 1) : first;
        multiply([&](int word) { return join(first + word * size, second + word * size); }, row, count, out);
        if (page + 1 == pages) clear(out, kLanes / 2, count);
      }
    } else {
      for (int page = 0; page < pages; ++page) {
        const uint32_t* const codes = take_codes(blocks, pages, page);
        int first = 0;
        for (; first + kLanes <= size; first += kLanes, out += kLanes) {
          multiply([&](int word) { return load_as<u32v>(codes + word * size + first); }, row, count, out);
        }
        if (const int lanes = size - first; lanes > 0) {
          multiply([&](int word) { return load_partial_words(codes + word * size + first, lanes); }, row, count, out);
          clear(out, lanes, count);
          out += kLanes;
        }
      }
    }
    const int64_t end = out - logits;
    for (int r = 0; r < count; ++r) {  // of the pages that complete the last kPagesAtOnce
      std::fill_n(logits + r * stride_ + end, std::min<int64_t>(stride_ - end, kPagesAtOnce * vectors_ * kLanes),
                  -kInfinity);
    }
  }

  // The lanes from `lanes` on have no tokens.
  void clear(float* out, int lanes, int count) const {
    for (int r = 0; r < count; ++r) std::fill(out + r * stride_ + lanes, out + r * stride_ + kLanes, -kInfinity);
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

  // One vector of tokens, whose words words(i) loads, for each row.
  template <class Words>
  FASTINFER_INLINE void multiply(const Words& words, int row, int count, float* out) const {
    if (count == kRowsAtOnce) return multiply<kRowsAtOnce>(words, row, out);
    if (count >= 4) {
      multiply<4>(words, row, out);
      row += 4, count -= 4, out += 4 * stride_;
    }
    switch (count) {
      case 1: return multiply<1>(words, row, out);
      case 2: return multiply<2>(words, row, out);
      case 3: return multiply<3>(words, row, out);
      default: return;
    }
  }

  template <int kRows, class Words>
  FASTINFER_INLINE void multiply(const Words& words, int row, float* out) const {
    i32v sums[kRows] = {};
    const int8_t* const q = &q_[row * p_.head_dim].value;
    for (int word = 0; word < words_ - 1; ++word) {
      const u8v codes = (u8v)words(word), low = low_nibbles(codes), high = high_nibbles(codes);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const int8_t* const x = q + r * p_.head_dim + word * kKeyCodesPerWord;
        sums[r] = add_products(add_products(sums[r], low, x), high, x + kKeyCodesPerWord / 2);
      }
    }
    const f32v scales = (f32v)words(words_ - 1);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Query& query = queries_[row + r];
      store(out + r * stride_, to_f32(2 * sums[r] - query.offset) * (scales * query.factor));
    }
  }

  // Adds the probabilities of a row to the pages' weights, and leaves them in the logits' place if values are weighed,
  // too. The weight of a page with an infinity or a NaN is infinite, so that attention shows it, and counts for no
  // other.
  void add_weights(int row, int pages) {
    float* const logits = logits_ + row * stride_;
    float* const own_sums = sums_ + row * pages_stride_;
    const bool keeps = p_.value_codes != nullptr;
    const int64_t size = halves_ ? (pages + 1) / 2 * kLanes : int64_t{pages} * vectors_ * kLanes;
    f32v largest = broadcast(-kInfinity);
    for (int64_t i = 0; i < size; i += kLanes) {
      const f32v v = load(logits + i);
      largest = max(select(v < kInfinity, v, largest), largest);
    }
    const float top = std::max(max_of_lanes(largest), -std::numeric_limits<float>::max());
    const auto exponentials = [&](int64_t i) __attribute__((always_inline)) {
      const f32v v = load(logits + i);
      const f32v probability = select(v < kInfinity, exp2(v - top), broadcast(kInfinity));
      if (keeps) store(logits + i, probability);
      return probability;
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
      store_as(own_sums + page, four);
      sums += four < kInfinity ? four : f32x4{};
    }
    const float sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    const float inverse = 1.0f / std::max(sum, std::numeric_limits<float>::min());
    for (int page = 0; page < pages; ++page) weights_[page] += own_sums[page] * inverse;
    if (keeps) rests_[row] = Rest{f32v{}, top, 0.0f, 0.0f, sum * kNegligible / static_cast<float>(pages)};
  }

  // The attention of a token to the pages that are not chosen, by codes of keys and values alone.
  template <class T>
  void attend_to_rest(int64_t token, const int32_t* blocks, int pages, int limit) {
    std::fill_n(results_, group_ * columns_, 0.0f);
    for (int page = 0; page < pages; ++page) {
      if (is_chosen(page, pages, limit)) continue;
      if (page + kValuePagesAhead < pages) {
        const uint32_t* const later = value_codes(blocks[page + kValuePagesAhead]);
        for (int i = 0; i < value_code_words(p_.head_dim, p_.block_size); i += 16) __builtin_prefetch(later + i);
      }
      const uint32_t* const codes = value_codes(blocks[page]);
      bool counts = false;
      for (int r = 0; r < group_; ++r) counts |= weigh(page, r, codes);
      if (!counts) continue;
      int r = 0;
      for (; r + 4 <= group_; r += 4) add_values<4>(codes, r);
      switch (group_ - r) {
        case 1: add_values<1>(codes, r); break;
        case 2: add_values<2>(codes, r); break;
        case 3: add_values<3>(codes, r); break;
        default: break;
      }
    }
    for (int r = 0; r < group_; ++r) {
      float* const result = results_ + r * columns_;
      const float offset = kLargestKeyLevel * reduce_add(rests_[r].weights);
      for (int i = 0; i < columns_; i += kLanes) store(result + i, load(result + i) - offset);
      std::fill(result + p_.head_dim, result + columns_, 0.0f);
      rotate(result, p_.head_dim);
      const float mass = rests_[r].mass;
      const float factor = mass > 0.0f ? 1.0f / (mass * static_cast<float>(hadamard_size(p_.head_dim))) : 0.0f;
      const int64_t head = token * p_.q_heads + kv_head_ * group_ + r;
      T* const out = static_cast<T*>(p_.rest) + head * p_.head_dim;
      for_each_vector(p_.head_dim,
                      [&](int64_t i, int64_t lanes) { store_lanes(out + i, load(result + i) * factor, lanes); });
      p_.rest_lse[head] = std::numbers::ln2_v<float> * (rests_[r].top + std::log2(mass));  // of 0 -infinity
    }
  }

  // Makes bytes of a page's probabilities times the values' scales. Returns whether they count.
  bool weigh(int page, int r, const uint32_t* codes) {
    Rest& rest = rests_[r];
    int8_t* const bytes = bytes_ + r * bytes_stride_;
    const float mass = sums_[r * pages_stride_ + page];
    rest.factor = 0.0f;
    if (mass <= rest.negligible) {
      std::fill_n(bytes, p_.block_size, 0);
      return false;
    }
    const int64_t place = halves_ ? int64_t{page} * p_.block_size : int64_t{page} * vectors_ * kLanes;
    const float* const probabilities = logits_ + r * stride_ + place;
    const float* const scales =
        reinterpret_cast<const float*>(codes + value_code_words(p_.head_dim, p_.block_size) - p_.block_size);
    f32v largest{};
    for (int i = 0; i < p_.block_size; i += kLanes) {
      const int lanes = std::min(kLanes, p_.block_size - i);
      const f32v weights = lanes == kLanes ? load(probabilities + i) * load(scales + i)
                                           : load_lanes(probabilities + i, lanes) * load_lanes(scales + i, lanes);
      store(row_weights_ + i, weights);
      largest = max(weights, largest);  // not a NaN, which shows below
    }
    const float top = max_of_lanes(largest);
    const float inverse = top > kSmallest ? 127.0f / top : 0.0f;
    rest.factor = top > kSmallest ? top / 127.0f : 0.0f;
    rest.mass += mass;
    for (int i = 0; i < p_.block_size; i += kLanes) {
      const f32v steps = load(row_weights_ + i) * inverse + 0.5f;  // from 0.5 upwards, where conversion rounds down
      const i32v rounded = __builtin_convertvector(steps, i32v);
      store_bytes(bytes + i, rounded);
      rest.weights += (to_f32(rounded) + (steps - steps)) * rest.factor;  // a NaN stays one
    }
    return true;
  }

  // Adds a page's values, weighed for the heads row .. row + kRows - 1.
  template <int kRows>
  FASTINFER_INLINE void add_values(const uint32_t* codes, int row) {
    for (int channel = 0; channel < p_.head_dim; channel += kLanes) {
      const int lanes = std::min(kLanes, p_.head_dim - channel);
      i32v sums[kRows] = {};
      for (int first = 0; first < p_.block_size; first += kKeyCodesPerWord) {
        const uint32_t* const words = codes + first / kKeyCodesPerWord * p_.head_dim + channel;
        const u8v eight = (u8v)(lanes == kLanes ? load_as<u32v>(words) : load_partial_words(words, lanes));
        const u8v low = low_nibbles(eight), high = high_nibbles(eight);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          const int8_t* const x = bytes_ + (row + r) * bytes_stride_ + first;
          sums[r] = add_products(add_products(sums[r], low, x), high, x + kKeyCodesPerWord / 2);
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        float* const result = results_ + (row + r) * columns_ + channel;
        store(result, load(result) + to_f32(sums[r]) * rests_[row + r].factor);
      }
    }
  }

  const uint32_t* value_codes(int32_t block) const {
    return p_.value_codes + (int64_t{block} * p_.kv_heads + kv_head_) * value_code_words(p_.head_dim, p_.block_size);
  }

  FASTINFER_INLINE static i32v first_half() {
    i32v mask{};
    for (int i = 0; i < kLanes / 2; ++i) mask[i] = -1;
    return mask;
  }

  const SelectPagesParams& p_;
  const int group_, kv_head_;
  const int most_rows_;  // query heads of tokens that are looked at
  const int words_;
  const bool halves_;  // whether a vector holds two pages
  const int vectors_;  // of a page
  const int pages_ahead_;
  int64_t stride_;        // of a row's logits
  int columns_;           // of a row that is rotated
  int kept_rows_;         // whose logits are kept at a time
  int64_t pages_stride_;  // of a row's sums of pages
  Int8* q_;
  float *logits_, *sums_, *weights_, *row_;
  Query* queries_;
  int32_t* numbers_;  // weights as integers; 0 for pages that are read in any case
  // For the pages that are not chosen:
  Rest* rests_;
  int bytes_stride_;
  int8_t* bytes_;
  float *results_, *row_weights_;  // [group][columns], [block_size]
};

void select_of_head(const SelectPagesParams& p, int64_t row, int head) {
  const int64_t begin = p.row_start != nullptr ? p.row_start[row] : row;
  const int64_t end = p.row_start != nullptr ? p.row_start[row + 1] : row + 1;
  int position = -1, pages = 0, chosen = 0;  // of the last token
  int32_t* const out = p.pages + (row * p.kv_heads + head) * p.max_blocks;
  if (begin < end) {
    const int seq =
        static_cast<int>(std::upper_bound(p.query_start, p.query_start + p.seqs + 1, begin) - p.query_start) - 1;
    position = std::max(p.seq_lens[seq] - p.query_start[seq + 1] + static_cast<int>(end) - 1, -1);
    chosen = pages = (position + p.block_size) / p.block_size;
    const int32_t* const blocks = p.block_table + seq * p.max_blocks;
    if (p.reads_all(pages)) {
      std::copy_n(blocks, pages, out);
      if (p.value_codes != nullptr) {
        const int group = p.q_heads / p.kv_heads;
        std::fill_n(p.rest_lse + row * p.q_heads + head * group, group, -kInfinity);
      }
    } else {
      chosen = PageSelection(p, head).choose(begin, end, position, blocks, pages, out);
    }
  }
  p.lens[row * p.kv_heads + head] = position + 1 - (pages - chosen) * p.block_size;
}

}  // namespace

void select_pages(const SelectPagesParams& p) {
  parallel_for(p.rows * p.kv_heads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) select_of_head(p, i / p.kv_heads, static_cast<int>(i % p.kv_heads));
  });
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
