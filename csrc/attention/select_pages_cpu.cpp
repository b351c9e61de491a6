// A logit q k is at most the sum of max(q_d least_d, q_d largest_d) over the channels d, which is one product of
// (min(q, 0), max(q, 0)) with (least, largest): the kernel of attention's logits computes it for 64 pages at a time.
//
// The query heads that share a KV head read the same pages, and their logits differ in size. So each head's bounds
// become probabilities, as if they were the logits of one key per page, and a page's weight is the sum over the heads.
#include "attention/select_pages.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <stdexcept>
#include <string>

#include "attention/attention_products_cpu.h"
#include "common/cpu/parallel.h"

namespace fastinfer::cpu::FASTINFER_ISA {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Pages in descending order of their weights, which are not negative, and of two equal weights the earlier page first.
uint64_t sort_key(float weight, int page) {
  return static_cast<uint64_t>(~std::bit_cast<uint32_t>(weight)) << 32 | static_cast<uint32_t>(page);
}

// One KV head.
class PageSelection {
 public:
  PageSelection(const SelectPagesParams& p, int kv_head)
      : p_(p), group_(p.q_heads / p.kv_heads), columns_(2 * p.head_dim), kv_head_(kv_head) {
    const int64_t tiles = (p.max_blocks + kTile - 1) / kTile;
    q_ = scratch_array<float>(0, group_ * columns_ + (group_ + 1) * tiles * kTile);
    bounds_ = q_ + group_ * columns_;
    weights_ = bounds_ + group_ * tiles * kTile;
    seen_ = scratch_array<Range>(1, group_);
    keys_ = scratch_array<uint64_t>(2, p.max_blocks);
  }

  // Writes `width` of the first `pages` blocks of a row of the block table.
  void choose(int64_t token, const int32_t* blocks, int pages, int32_t* out) {
    dispatch(p_.dtype, [&]<class T>(T) { load_queries<T>(token); });
    const int end = pages - kLastPages, n = end - kFirstPages, count = p_.width - kFirstPages - kLastPages;
    bound(blocks + kFirstPages, n);
    std::fill_n(weights_, (n + kLanes - 1) / kLanes * kLanes, 0.0f);
    for (int r = 0; r < group_; ++r) add_weights(r, n);
    for (int i = 0; i < n; ++i) keys_[i] = sort_key(weights_[i], kFirstPages + i);
    std::nth_element(keys_, keys_ + count, keys_ + n);
    std::sort(keys_, keys_ + count, [](uint64_t a, uint64_t b) { return uint32_t(a) < uint32_t(b); });
    *out++ = blocks[0];
    for (int i = 0; i < count; ++i) *out++ = blocks[static_cast<uint32_t>(keys_[i])];
    std::copy_n(blocks + end, kLastPages, out);
  }

 private:
  template <class T>
  void load_queries(int64_t token) {
    const T* const q = static_cast<const T*>(p_.q) + token * p_.q_stride + int64_t{kv_head_} * group_ * p_.head_dim;
    for (int r = 0; r < group_; ++r) {
      float* const row = q_ + r * columns_;
      for_each_vector(p_.head_dim, [&](int64_t i, int64_t lanes) {
        const f32v v = load_lanes(q + r * p_.head_dim + i, lanes);
        store_lanes(row + i, select(v > 0.0f, f32v{}, v), lanes);  // a NaN stays
        store_lanes(row + p_.head_dim + i, select(v < 0.0f, f32v{}, v), lanes);
      });
    }
  }

  // Finds the bounds of the pages from `tile` on; beyond the last page those of the first one.
  void find(const int32_t* blocks, int pages, int tile, const BFloat16** bounds) const {
    for (int j = 0; j < kTile; ++j) {
      const int32_t block = blocks[tile + j < pages ? tile + j : tile];
      if (block < 0 || block >= p_.num_blocks) {
        throw std::runtime_error("select_pages: block_table must have blocks in 0.." +
                                 std::to_string(p_.num_blocks - 1) + ", got " + std::to_string(block));
      }
      bounds[j] = p_.bounds + (int64_t{block} * p_.kv_heads + kv_head_) * columns_;
    }
  }

  // bounds_[tiles][group][kTile]: the bounds of the logits, without their scale; -infinity beyond the last page.
  void bound(const int32_t* blocks, int pages) {
    const BFloat16* found[2][kTile];
    find(blocks, pages, 0, found[0]);
    for (int tile = 0, i = 0; tile < pages; tile += kTile, i = 1 - i) {
      const bool last = tile + kTile >= pages;
      if (!last) find(blocks, pages, tile + kTile, found[1 - i]);
      const int count = std::min(kTile, pages - tile);
      float* const out = bounds_ + tile * group_;
      std::fill_n(seen_, group_, Range{0, count});
      multiply_keys<true>(q_, columns_, seen_, group_, found[i], found[last ? i : 1 - i], out);
      for (int r = 0; r < group_; ++r) std::fill(out + r * kTile + count, out + (r + 1) * kTile, -kInfinity);
    }
  }

  // Adds the softmax of a head's bounds to the pages' weights. The weight of a page with an infinity or a NaN is
  // infinite, so that attention shows it, and counts for no other.
  void add_weights(int head, int pages) {
    f32v largest = broadcast(-kInfinity), sum{};
    for_each_vector_of(head, pages, [&](float* bounds, float*) {
      const f32v v = load(bounds) * p_.scale;
      store(bounds, v);
      largest = max(select(v < kInfinity, v, largest), largest);
    });
    const float top = std::max(reduce_max(largest), -std::numeric_limits<float>::max());
    for_each_vector_of(head, pages, [&](float* bounds, float*) {
      const f32v v = load(bounds);
      const f32v e = exp(v - top);
      sum += select(v < kInfinity, e, f32v{});
      store(bounds, select(v < kInfinity, e, broadcast(kInfinity)));
    });
    const float inverse = 1.0f / std::max(reduce_add(sum), std::numeric_limits<float>::min());
    for_each_vector_of(head, pages,
                       [&](float* bounds, float* weights) { store(weights, load(weights) + load(bounds) * inverse); });
  }

  template <class Fn>
  FASTINFER_INLINE void for_each_vector_of(int head, int pages, const Fn& fn) {
    for (int i = 0; i < pages; i += kLanes) {
      fn(bounds_ + (i / kTile * group_ + head) * kTile + i % kTile, weights_ + i);
    }
  }

  const SelectPagesParams& p_;
  const int group_, columns_, kv_head_;
  float *q_, *bounds_, *weights_;
  Range* seen_;
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
