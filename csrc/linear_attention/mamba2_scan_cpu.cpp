// A unit of work is one head of one sequence. Tokens go through it a few at a time: their b, c and dt x are prepared,
// then each block of columns of the state, which do not depend on each other, takes all of them, and their outputs are
// gated. The norm, of the heads of a group together, comes last.
//
// A sweep over the state takes up to kAtOnce tokens whose states nobody stores: a row stays in registers through all of
// them. The state is read where it lies: in the slot, or in scratch memory.
#include <algorithm>
#include <cmath>

#include "common/cpu/parallel.h"
#include "common/cpu/vec.h"
#include "linear_attention/mamba2_scan.h"
#include "linear_attention/state_cpu.h"

namespace fastinfer::cpu::FASTINFER_ISA {
namespace {

constexpr int64_t kTokens = 16;
constexpr int kAtOnce = 4;
constexpr int kVectorsOfBlock = 2;  // a block's columns
constexpr int kVectorsAlone = 4;    // of a sequence with one token, with AVX-512: a head of 64 is read in one pass
enum Scratch { kB, kC, kValues, kOutputs, kState };

// What some tokens bring: decay, dt x, b and c.
struct Inputs {
  const float* decay;
  const float* values;
  int64_t value_stride;
  const float* b;
  const float* c;
  int64_t rows;  // of the state; the elements of b and c
};

// Takes kCount tokens through the state at `from`; the last one's goes to `to`, which may be `from`, and S^T c of each
// to `outputs`. A token's numbers are the same to the last bit for any kCount, whatever the compiler fuses.
template <int kVectors, int kCount>
__attribute__((noinline)) void sweep(Columns<const float> from, Columns<float> to, const Inputs& inputs,
                                     float* outputs) {
  const Inputs in = inputs;
  f32v sums[kCount][kVectors] = {}, values[kCount][kVectors];
  float decay[kCount];
  for (int i = 0; i < kCount; ++i) {
    decay[i] = in.decay[i];
    for (int v = 0; v < kVectors; ++v) values[i][v] = load(in.values + i * in.value_stride + v * kLanes);
  }
  for (int64_t row = 0; row < in.rows; ++row) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      f32v s = load(from.data + row * from.stride + v * kLanes);
#pragma GCC unroll 4
      for (int i = 0; i < kCount; ++i) {
        s = in_register(in_register(s * decay[i]) + values[i][v] * in.b[i * in.rows + row]);
        sums[i][v] += s * in.c[i * in.rows + row];
      }
      store(to.data + row * to.stride + v * kLanes, s);
    }
  }
  for (int i = 0; i < kCount; ++i) {
    for (int v = 0; v < kVectors; ++v) store(outputs + i * in.value_stride + v * kLanes, sums[i][v]);
  }
}

template <class T>
FASTINFER_INLINE void copy_floats(const T* from, int64_t count, float factor, float* to) {
  for (int64_t i = 0; i < count; i += kLanes) store(to + i, load(from + i) * factor);
}

// One head of one sequence.
template <class T>
class Head {
 public:
  Head(const Mamba2ScanParams& p, int64_t seq, int64_t head)
      : p_(p),
        seq_(seq),
        head_(head),
        b_(scratch_array<float>(kB, kTokens * p.state_dim)),
        c_(scratch_array<float>(kC, kTokens * p.state_dim)),
        values_(scratch_array<float>(kValues, kTokens * p.head_dim)),
        outputs_(scratch_array<float>(kOutputs, kTokens * p.head_dim)),
        state_(scratch_array<float>(kState, p.state_dim * p.head_dim)) {}

  void run() {
    const int64_t begin = p_.slots.query_start[seq_], end = p_.slots.query_start[seq_ + 1];
    for (int64_t first = begin; first < end; first += kTokens) {
      first_ = first;
      count_ = std::min(kTokens, end - first);
      for (int64_t i = 0; i < count_; ++i) prepare(i);
      const int64_t slot = first == begin ? p_.slots.reads[seq_] : p_.slots.writes[first - 1];
      if (first == begin && slot < 0) std::fill_n(state_, p_.state_dim * p_.head_dim, 0.0f);
      int64_t column = 0;
      const auto blocks = [&]<int kVectors, int kMost>() {
        for (; column + kVectors * kLanes <= p_.head_dim; column += kVectors * kLanes) {
          run_columns<kVectors, kMost>(column, slot);
        }
      };
      if (kLanes == 16 && end - begin == 1) blocks.template operator()<kVectorsAlone, 1>();
      blocks.template operator()<kVectorsOfBlock, kAtOnce>();
      blocks.template operator()<1, kAtOnce>();
      for (int64_t i = 0; i < count_; ++i) finish(i);
    }
  }

 private:
  const T* x_row(int64_t i) const {
    return static_cast<const T*>(p_.xbc) + (first_ + i) * p_.xbc_stride;
  }

  void prepare(int64_t i) {
    const int64_t token = first_ + i, dim = p_.state_dim, group = head_ / (p_.heads / p_.groups);
    const T* const b = x_row(i) + p_.heads * p_.head_dim + group * dim;
    copy_floats(b, dim, 1.0f, b_ + i * dim);
    copy_floats(b + p_.groups * dim, dim, 1.0f, c_ + i * dim);
    const float step = load_float(p_.dt, p_.dt_dtype, token * p_.dt_stride + head_) + p_.dt_bias[head_];
    const float dt = std::min(std::max(softplus(step), p_.dt_min), p_.dt_max);
    decay_[i] = std::exp(-std::exp(p_.a_log[head_]) * dt);
    copy_floats(x_row(i) + head_ * p_.head_dim, p_.head_dim, dt, values_ + i * p_.head_dim);
  }

  // `slot` has the state before the first token; -1: scratch memory has it. Up to kMost tokens at once.
  template <int kVectors, int kMost>
  void run_columns(int64_t column, int64_t slot) {
    const Columns<float> kept{state_ + column * p_.state_dim, kVectors * kLanes};
    Columns<float> at = slot < 0 ? kept : in_slot(slot, column);
    for (int64_t i = 0; i < count_;) {
      int64_t unstored = 0;
      while (unstored < kMost && i + unstored < count_ && p_.slots.writes[first_ + i + unstored] < 0) ++unstored;
      const int64_t count = unstored == kMost ? kMost : 1, write = p_.slots.writes[first_ + i + count - 1];
      const Columns<float> to = write < 0 ? kept : in_slot(write, column);
      const Inputs inputs{.decay = decay_ + i,
                          .values = values_ + i * p_.head_dim + column,
                          .value_stride = p_.head_dim,
                          .b = b_ + i * p_.state_dim,
                          .c = c_ + i * p_.state_dim,
                          .rows = p_.state_dim};
      float* const outputs = outputs_ + i * p_.head_dim + column;
      const Columns<const float> from{at.data, at.stride};
      count == kMost ? sweep<kVectors, kMost>(from, to, inputs, outputs)
                     : sweep<kVectors, 1>(from, to, inputs, outputs);
      at = to;
      i += count;
    }
  }

  // y of a token, to where the norm finds it, or to the result.
  void finish(int64_t i) const {
    const int64_t token = first_ + i, dim = p_.head_dim, at = (token * p_.heads + head_) * dim;
    const float* const sums = outputs_ + i * dim;
    const T* const x = x_row(i) + head_ * dim;
    const T* const z = static_cast<const T*>(p_.z) + token * p_.z_stride + head_ * dim;
    for (int64_t j = 0; j < dim; j += kLanes) {
      const f32v y = (load(sums + j) + load(x + j) * p_.d[head_]) * silu(load(z + j));
      if (p_.norm_weight != nullptr) {
        store(p_.outputs + at + j, y);
      } else {
        store(static_cast<T*>(p_.out) + at + j, y);
      }
    }
  }

  Columns<float> in_slot(int64_t slot, int64_t column) const {
    return {p_.state + slot * p_.slots.stride + head_ * p_.state_dim * p_.head_dim + column, p_.head_dim};
  }

  const Mamba2ScanParams& p_;
  const int64_t seq_, head_;
  int64_t first_, count_;  // the tokens at work
  float* const b_;         // [kTokens, state_dim]
  float* const c_;         // [kTokens, state_dim]
  float* const values_;    // [kTokens, head_dim]: dt x
  float* const outputs_;   // [kTokens, head_dim]
  float* const state_;     // blocks of columns, each [state_dim, its columns]
  float decay_[kTokens];
};

// The norm of one group of heads of one token.
template <class T>
void normalize(const Mamba2ScanParams& p, int64_t token, int64_t group) {
  const int64_t size = p.heads / p.groups * p.head_dim, first = group * size;
  const float* const y = p.outputs + token * p.heads * p.head_dim + first;
  T* const out = static_cast<T*>(p.out) + token * p.heads * p.head_dim + first;
  f32v squares{};
  for (int64_t i = 0; i < size; i += kLanes) squares += load(y + i) * load(y + i);
  const float scale = 1.0f / std::sqrt(reduce_add(squares) / static_cast<float>(size) + p.eps);
  dispatch(p.norm_weight_dtype, [&]<class W>(W) {
    const W* const weight = static_cast<const W*>(p.norm_weight) + first;
    for (int64_t i = 0; i < size; i += kLanes) store(out + i, load(y + i) * scale * load(weight + i));
  });
}

}  // namespace

void mamba2_scan(const Mamba2ScanParams& p) {
  dispatch(p.dtype, [&]<class T>(T) {
    parallel_for(p.slots.seqs * p.heads, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) Head<T>(p, i / p.heads, i % p.heads).run();
    });
    if (p.norm_weight == nullptr) return;
    parallel_for(p.tokens * p.groups, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) normalize<T>(p, i / p.groups, i % p.groups);
    });
  });
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
