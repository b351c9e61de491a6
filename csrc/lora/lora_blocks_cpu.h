// Rows sorted by their matrices, and cut into blocks that share them.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <string>

#include "common/cpu/parallel.h"
#include "common/cpu/vec.h"
#include "lora/add_lora.h"
#include "norm/rms_norm_cpu.h"

namespace fastinfer::cpu::FASTINFER_ISA {

enum class LoraScratch { kRows, kBlocks, kX, kHidden, kRowBuffer };

template <class T>
T* scratch_array(LoraScratch slot, size_t count) {
  return cpu::scratch_array<T>(static_cast<int>(slot), count);
}

inline void check_index(const char* name, int64_t at, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high) {
    throw std::runtime_error("add_lora: " + std::string(name) + "[" + std::to_string(at) + "] must be in [" +
                             std::to_string(low) + ", " + std::to_string(high) + "], got " + std::to_string(value));
  }
}

// The index of a row's matrices in a and b; -1 for none.
inline int64_t matrix_of(const AddLoraParams& p, int64_t row) {
  const int64_t token = row / p.rows_per_token, slot = p.adapter_ids[token];
  if (slot < 0) return -1;
  check_index("adapter_ids", token, slot, 0, p.slots - 1);
  if (p.expert_ids == nullptr) return slot;
  const int64_t at = row % p.num_expert_ids;
  check_index("expert_ids", at, p.expert_ids[at], 0, p.experts - 1);
  return slot * p.experts + p.expert_ids[at];
}

inline int32_t rank_of(const AddLoraParams& p, int64_t matrix) {
  if (matrix < 0) return 0;
  const int64_t rank = p.ranks != nullptr ? p.ranks[matrix] : p.max_rank;
  check_index("ranks", matrix, rank, 0, p.max_rank);
  return static_cast<int32_t>(rank);
}

class LoraBlocks {
 public:
  // The sorted rows first .. first + count, in tiles of 16 rows from `tile` on.
  struct Block {
    int64_t matrix, first, count, tile;
    int32_t rank;
  };

  // Of the rows from `begin` on those that have an adapter, `most` at a time.
  LoraBlocks(const AddLoraParams& p, int64_t begin, int64_t most) : p_(p) {
    const int64_t matrices = p.slots * p.experts;
    auto* ends = scratch_array<int64_t>(LoraScratch::kBlocks, matrices);
    std::fill_n(ends, matrices, 0);
    for (int64_t row = begin; row < p.m; ++row) {
      const int64_t matrix = matrix_of(p, row);
      if (rank_of(p, matrix) > 0) ++ends[matrix];
    }
    for (int64_t matrix = 0; matrix < matrices; ++matrix) ends[matrix] = num_rows_ += ends[matrix];
    if (num_rows_ == 0) return;
    rows_ = scratch_array<int64_t>(LoraScratch::kRows, num_rows_);
    for (int64_t row = p.m - 1; row >= begin; --row) {
      const int64_t matrix = matrix_of(p, row);
      if (rank_of(p, matrix) > 0) rows_[--ends[matrix]] = row;
    }
    blocks_ = scratch_array<Block>(LoraScratch::kBlocks, num_rows_);
    for (int64_t i = 0; i < num_rows_; ++i) {
      const int64_t matrix = matrix_of(p, rows_[i]);
      Block* last = blocks_ + count_ - 1;
      if (count_ > 0 && last->matrix == matrix && last->count < most) {
        ++last->count;
      } else {
        const int64_t tile = count_ > 0 ? last->tile + (last->count + 15) / 16 : 0;
        blocks_[count_++] = {matrix, i, 1, tile, rank_of(p, matrix)};
      }
    }
  }

  const Block& operator[](int64_t block) const {
    return blocks_[block];
  }
  int64_t count() const {
    return count_;
  }
  int64_t num_rows() const {
    return num_rows_;
  }

  // The input of the i-th sorted row after the norm, fp32.
  template <class T>
  void load_row(int64_t i, float* out) const {
    const T* x = static_cast<const T*>(p_.x) + rows_[i] / p_.rows_per_input * p_.x_stride;
    if (p_.norm_weight.data == nullptr) {
      for_each_vector(p_.in, [&](int64_t j, int64_t lanes) { store_lanes(out + j, load_lanes(x + j, lanes), lanes); });
    } else {
      dispatch(p_.norm_weight.dtype,
               [&]<class N>(N) { rms_norm_row(x, static_cast<const N*>(p_.norm_weight.data), p_.in, p_.eps, out); });
    }
  }

  // An output of the i-th sorted row. A run is a multiple of 16, so what follows as far as the next one is of the same
  // run.
  template <class T>
  T* y_at(int64_t i, int64_t column) const {
    const int64_t run = p_.run == p_.out ? 0 : column / p_.run;
    return static_cast<T*>(p_.y) + rows_[i] * p_.y_stride + run * (p_.run_stride - p_.run) + column;
  }

 private:
  const AddLoraParams& p_;
  int64_t num_rows_ = 0, count_ = 0;
  int64_t* rows_ = nullptr;
  Block* blocks_ = nullptr;
};

}  // namespace fastinfer::cpu::FASTINFER_ISA
