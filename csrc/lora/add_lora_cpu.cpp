// Tokens (of a mixture of experts: a token's rows, one for each of its experts) are sorted by their matrices and cut
// into blocks that share them. Shrink: dot products with the rows of A, a few tokens by a few rows at a time. Expand:
// B's rows, weighted by those products, are added up in registers; what a thread reads of B serves all tokens of a
// block. Every sum has one order, whatever else is in the batch.
#include "lora/add_lora.h"

#include <algorithm>

#include "common/cpu/reduce.h"
#include "lora/lora_blocks_cpu.h"
#if defined(FASTINFER_TILES)
#include "lora/tile_lora_cpu.h"
#endif

namespace fastinfer::cpu::FASTINFER_ISA {
namespace {

constexpr int64_t kBlockTokens = 24;  // four tiles; of 4096 inputs they take 384 KB
constexpr int64_t kRanks = 4;         // rows of A in one unit of work
constexpr int64_t kColumns = 128;     // columns of B in one unit of work
constexpr int64_t kChunk = 1024;      // columns of B that are read at a time

// acc += a[kN rows] x[kM rows] over `in` inputs. 6 x 2 takes 12 sums and 3 operands, of AVX2's 16 registers; inlined,
// its sums would be spilled.
template <int kM, int kN, class W>
__attribute__((noinline)) void shrink(const W* a, int64_t in, const float* x, int64_t x_stride, float* out,
                                      int64_t out_stride) {
  f32v acc[kM][kN] = {};
  const auto step = [&](int64_t i, auto&& load_weights) __attribute__((always_inline)) {
    f32v w[kN];
#pragma GCC unroll 8
    for (int c = 0; c < kN; ++c) w[c] = load_weights(a + c * in + i);
#pragma GCC unroll 8
    for (int r = 0; r < kM; ++r) {
      const f32v row = in_register(load(x + r * x_stride + i));
#pragma GCC unroll 8
      for (int c = 0; c < kN; ++c) acc[r][c] += w[c] * row;
    }
  };
  const int64_t whole = in / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    step(i, [](const W* w) __attribute__((always_inline)) { return load(w); });
  }
  if (whole < in) step(whole, [&](const W* w) { return load_partial(w, in - whole); });
#pragma GCC unroll 8
  for (int r = 0; r < kM; ++r) {
    const f32x4 sums = reduce_add(acc[r][0], acc[r][1 % kN], acc[r][2 % kN], acc[r][3 % kN]);
    for (int c = 0; c < kN; ++c) out[r * out_stride + c] = sums[c];
  }
}

// sums += weights[kRows] b[kRows rows, stride apart] over `count` columns; `sums` has room for whole vectors.
template <int kRows, class W>
FASTINFER_INLINE void add_rows(const W* b, int64_t stride, const float* weights, int64_t count, float* sums) {
  for_each_vector(count, [&](int64_t i, int64_t lanes) {
    f32v sum = load(sums + i);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) sum += load_lanes(b + r * stride + i, lanes) * weights[r];
    store(sums + i, sum);
  });
}

class AddLora {
  using Block = LoraBlocks::Block;

 public:
  explicit AddLora(const AddLoraParams& p)
      : p_(p), blocks_(p, 0, kBlockTokens), x_stride_((p.in + kLanes - 1) / kLanes * kLanes + 16) {}

  template <class T, class W>
  void run() {
    if (blocks_.count() == 0) return;
    rows_ = scratch_array<float>(LoraScratch::kX, blocks_.num_rows() * x_stride_);
    hidden_ = scratch_array<float>(LoraScratch::kHidden, blocks_.num_rows() * p_.max_rank);
    parallel_for(blocks_.num_rows(), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) prepare<T>(i);
    });
    const int64_t rank_units = (p_.max_rank + kRanks - 1) / kRanks;
    parallel_for(blocks_.count() * rank_units, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) shrink_unit<W>(blocks_[i / rank_units], i % rank_units * kRanks);
    });
    parallel_for((p_.out + kColumns - 1) / kColumns, [&](int64_t begin, int64_t end) {
      for (int64_t i = 0; i < blocks_.count(); ++i) {
        expand_block<T, W>(blocks_[i], begin * kColumns, std::min(end * kColumns, p_.out));
      }
    });
  }

 private:
  // A row of x after the norm, fp32, with zeros up to a multiple of kLanes.
  template <class T>
  void prepare(int64_t i) const {
    float* row = rows_ + i * x_stride_;
    blocks_.load_row<T>(i, row);
    std::fill(row + p_.in, row + (p_.in + kLanes - 1) / kLanes * kLanes, 0.0f);
  }

  template <class W>
  void shrink_unit(const Block& block, int64_t rank0) const {
    const W* a = static_cast<const W*>(p_.a) + block.matrix * p_.max_rank * p_.in;
    const auto tile = [&]<int kM, int kN>(int64_t token, int64_t rank) {
      shrink<kM, kN>(a + rank * p_.in, p_.in, rows_ + token * x_stride_, x_stride_,
                     hidden_ + token * p_.max_rank + rank, p_.max_rank);
    };
    const int64_t ranks = std::min<int64_t>(rank0 + kRanks, block.rank), end = block.first + block.count;
    int64_t token = block.first;
    for (; token + 6 <= end; token += 6) {
      int64_t rank = rank0;
      for (; rank + 2 <= ranks; rank += 2) tile.template operator()<6, 2>(token, rank);
      for (; rank < ranks; ++rank) tile.template operator()<6, 1>(token, rank);
    }
    for (; token < end; ++token) {
      int64_t rank = rank0;
      for (; rank + 4 <= ranks; rank += 4) tile.template operator()<1, 4>(token, rank);
      for (; rank < ranks; ++rank) tile.template operator()<1, 1>(token, rank);
    }
  }

  // Tokens left over from tiles of six come first: they read B in order, which memory is fast at, and leave it in the
  // cache for the tiles.
  template <class T, class W>
  void expand_block(const Block& block, int64_t begin, int64_t end) const {
    const int64_t tiles = block.first + block.count % 6, last = block.first + block.count;
    for (int64_t column = begin; column < end; column += kChunk) {
      const int64_t chunk_end = std::min(column + kChunk, end);
      for (int64_t token = block.first; token < tiles; ++token) expand_token<T, W>(block, token, column, chunk_end);
      for (int64_t token = tiles; token < last; token += 6) {
        int64_t n = column;
        for (; n + 2 * kLanes <= chunk_end; n += 2 * kLanes) expand_tile<T, W, 2>(block, token, n, kLanes);
        for (; n < chunk_end; n += kLanes) {
          expand_tile<T, W, 1>(block, token, n, std::min<int64_t>(chunk_end - n, kLanes));
        }
      }
    }
  }

  // One token, B row by row, four of them at a time.
  template <class T, class W>
  void expand_token(const Block& block, int64_t token, int64_t begin, int64_t end) const {
    const W* b = rows_of_b<W>(block) + begin;
    const float* hidden = hidden_ + token * p_.max_rank;
    alignas(64) float sums[kChunk] = {};
    int64_t rank = 0;
    for (; rank + 4 <= block.rank; rank += 4) add_rows<4>(b + rank * p_.out, p_.out, hidden + rank, end - begin, sums);
    for (; rank < block.rank; ++rank) add_rows<1>(b + rank * p_.out, p_.out, hidden + rank, end - begin, sums);
    for_each_vector(end - begin, [&](int64_t i, int64_t lanes) {
      T* y = blocks_.y_at<T>(token, begin + i);
      store_lanes(y, load_lanes(y, lanes) + load(sums + i), lanes);
    });
  }

  // Six tokens and kN vectors of columns, the last of which may be incomplete where kN is 1; registers as in shrink.
  template <class T, class W, int kN>
  __attribute__((noinline)) void expand_tile(const Block& block, int64_t token, int64_t column, int64_t lanes) const {
    constexpr int kM = 6;
    const W* b = rows_of_b<W>(block) + column;
    const float* hidden = hidden_ + token * p_.max_rank;
    f32v acc[kM][kN] = {};
    for (int64_t rank = 0; rank < block.rank; ++rank, b += p_.out) {
      f32v w[kN];
#pragma GCC unroll 8
      for (int c = 0; c < kN; ++c) w[c] = kN == 1 ? load_lanes(b, lanes) : load(b + c * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < kM; ++r) {
        const f32v h = in_register(broadcast(hidden[r * p_.max_rank + rank]));
#pragma GCC unroll 8
        for (int c = 0; c < kN; ++c) acc[r][c] += w[c] * h;
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kM; ++r) {
#pragma GCC unroll 8
      for (int c = 0; c < kN; ++c) {
        T* y = blocks_.y_at<T>(token + r, column + c * kLanes);
        if constexpr (kN == 1) {
          store_lanes(y, load_lanes(y, lanes) + acc[r][c], lanes);
        } else {
          store(y, load(y) + acc[r][c]);
        }
      }
    }
  }

  template <class W>
  const W* rows_of_b(const Block& block) const {
    return static_cast<const W*>(p_.b) + block.matrix * p_.max_rank * p_.out;
  }

  const AddLoraParams& p_;
  const LoraBlocks blocks_;
  const int64_t x_stride_;   // a cache line more, so that rows of a power of two do not share a set of the cache
  float* rows_ = nullptr;    // [blocks_.num_rows(), x_stride]
  float* hidden_ = nullptr;  // [blocks_.num_rows(), max_rank]
};

}  // namespace

void add_lora(const AddLoraParams& p) {
#if defined(FASTINFER_TILES)
  TileLora lora(p);
#else
  AddLora lora(p);
#endif
  dispatch(p.dtype, [&]<class T>(T) { dispatch(p.weight_dtype, [&]<class W>(W) { lora.run<T, W>(); }); });
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
