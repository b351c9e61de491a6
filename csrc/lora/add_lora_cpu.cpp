// Tokens (of a mixture of experts: a token's rows, one for each of its experts) are sorted by their matrices and cut
// into blocks that share them. Shrink: dot products with the rows of A, a few tokens by a few rows at a time. Expand:
// B's rows, weighted by those products, are added up in registers; what a thread reads of B serves all tokens of a
// block. Every sum has one order, whatever else is in the batch.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "common/cpu/parallel.h"
#include "common/cpu/reduce.h"
#include "common/cpu/vec.h"
#include "lora/add_lora.h"
#include "norm/rms_norm_cpu.h"

namespace fastinfer::cpu::FASTINFER_ISA {
namespace {

constexpr int64_t kBlockTokens = 24;  // four tiles; of 4096 inputs they take 384 KB
constexpr int64_t kRanks = 4;         // rows of A in one unit of work
constexpr int64_t kColumns = 128;     // columns of B in one unit of work
constexpr int64_t kChunk = 1024;      // columns of B that are read at a time
enum Scratch { kTokens, kBlocks, kRows, kHidden };

// Tokens first .. first + count of those sorted by their matrices.
struct Block {
  int64_t matrix, first, count;
  int32_t rank;
};

void check_index(const char* name, int64_t at, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high) {
    throw std::runtime_error("add_lora: " + std::string(name) + "[" + std::to_string(at) + "] must be in [" +
                             std::to_string(low) + ", " + std::to_string(high) + "], got " + std::to_string(value));
  }
}

// The index of a row's matrices in a and b; -1 for none.
int64_t matrix_of(const AddLoraParams& p, int64_t row) {
  const int64_t token = row / p.rows_per_token, slot = p.adapter_ids[token];
  if (slot < 0) return -1;
  check_index("adapter_ids", token, slot, 0, p.slots - 1);
  if (p.expert_ids == nullptr) return slot;
  check_index("expert_ids", row, p.expert_ids[row], 0, p.experts - 1);
  return slot * p.experts + p.expert_ids[row];
}

int32_t rank_of(const AddLoraParams& p, int64_t matrix) {
  if (matrix < 0) return 0;
  const int64_t rank = p.ranks != nullptr ? p.ranks[matrix] : p.max_rank;
  check_index("ranks", matrix, rank, 0, p.max_rank);
  return static_cast<int32_t>(rank);
}

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
 public:
  explicit AddLora(const AddLoraParams& p) : p_(p), x_stride_((p.in + kLanes - 1) / kLanes * kLanes + 16) {
    group();
  }

  template <class T, class W>
  void run() {
    if (num_blocks_ == 0) return;
    parallel_for(num_tokens_, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) prepare<T>(i);
    });
    const int64_t rank_units = (p_.max_rank + kRanks - 1) / kRanks;
    parallel_for(num_blocks_ * rank_units, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) shrink_unit<W>(blocks_[i / rank_units], i % rank_units * kRanks);
    });
    parallel_for((p_.out + kColumns - 1) / kColumns, [&](int64_t begin, int64_t end) {
      for (int64_t i = 0; i < num_blocks_; ++i) {
        expand_block<T, W>(blocks_[i], begin * kColumns, std::min(end * kColumns, p_.out));
      }
    });
  }

 private:
  // Sorts the tokens that have an adapter, and cuts them into blocks.
  void group() {
    const int64_t matrices = p_.slots * p_.experts;
    auto* ends = scratch_array<int64_t>(kBlocks, matrices);
    std::fill_n(ends, matrices, 0);
    for (int64_t row = 0; row < p_.rows; ++row) {
      const int64_t matrix = matrix_of(p_, row);
      if (rank_of(p_, matrix) > 0) ++ends[matrix];
    }
    for (int64_t matrix = 0; matrix < matrices; ++matrix) ends[matrix] = num_tokens_ += ends[matrix];
    if (num_tokens_ == 0) return;
    tokens_ = scratch_array<int64_t>(kTokens, num_tokens_);
    for (int64_t row = p_.rows - 1; row >= 0; --row) {
      const int64_t matrix = matrix_of(p_, row);
      if (rank_of(p_, matrix) > 0) tokens_[--ends[matrix]] = row;
    }
    blocks_ = scratch_array<Block>(kBlocks, num_tokens_);
    for (int64_t i = 0; i < num_tokens_; ++i) {
      const int64_t matrix = matrix_of(p_, tokens_[i]);
      Block* last = blocks_ + num_blocks_ - 1;
      if (num_blocks_ > 0 && last->matrix == matrix && last->count < kBlockTokens) {
        ++last->count;
      } else {
        blocks_[num_blocks_++] = {matrix, i, 1, rank_of(p_, matrix)};
      }
    }
    rows_ = scratch_array<float>(kRows, num_tokens_ * x_stride_);
    hidden_ = scratch_array<float>(kHidden, num_tokens_ * p_.max_rank);
  }

  // A row of x after the norm, fp32, with zeros up to a multiple of kLanes.
  template <class T>
  void prepare(int64_t i) const {
    const T* x = static_cast<const T*>(p_.x) + tokens_[i] / p_.rows_per_input * p_.x_stride;
    float* row = rows_ + i * x_stride_;
    if (p_.norm_weight.data == nullptr) {
      for_each_vector(p_.in, [&](int64_t j, int64_t lanes) { store_lanes(row + j, load_lanes(x + j, lanes), lanes); });
    } else {
      dispatch(p_.norm_weight.dtype,
               [&]<class N>(N) { rms_norm_row(x, static_cast<const N*>(p_.norm_weight.data), p_.in, p_.eps, row); });
    }
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
      T* y = y_at<T>(token, begin + i);
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
        T* y = y_at<T>(token + r, column + c * kLanes);
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

  // A run is a multiple of a vector, so what follows as far as a vector reaches is of the same run.
  template <class T>
  T* y_at(int64_t token, int64_t column) const {
    const int64_t run = p_.run == p_.out ? 0 : column / p_.run;
    return static_cast<T*>(p_.y) + tokens_[token] * p_.y_stride + run * (p_.run_stride - p_.run) + column;
  }

  const AddLoraParams& p_;
  const int64_t x_stride_;  // a cache line more, so that rows of a power of two do not share a set of the cache
  int64_t num_tokens_ = 0, num_blocks_ = 0;
  int64_t* tokens_;  // [num_tokens], by adapter
  Block* blocks_;
  float* rows_;    // [num_tokens, x_stride]
  float* hidden_;  // [num_tokens, max_rank]
};

}  // namespace

void add_lora(const AddLoraParams& p) {
  AddLora lora(p);
  dispatch(p.dtype, [&]<class T>(T) { dispatch(p.weight_dtype, [&]<class W>(W) { lora.run<T, W>(); }); });
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
