// A unit of work is one value head of one sequence. Tokens go through it a few at a time: their keys, queries and gates
// are prepared, then each block of columns of the state, which do not depend on each other, takes all of them, and
// their outputs are normalised.
//
// A sweep adds the last token's k d^T to the state and sums up S^T k and S^T q for the next token at once. The state is
// read where it lies: in the slot, in which a decode step's second sweep finds it in the L2, or in scratch memory.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "common/cpu/parallel.h"
#include "common/cpu/softplus.h"
#include "common/cpu/vec.h"
#include "linear_attention/gated_delta_rule.h"
#include "linear_attention/state_cpu.h"

namespace fastinfer::cpu::FASTINFER_ISA {
namespace {

constexpr int64_t kTokens = 16;
constexpr int64_t kColumns = 32;                // of 128 rows 16 KB, which the L1 holds
constexpr int64_t kColumnsAlone = 128;          // of a sequence with one token, with AVX-512: a head in one pass
constexpr int kRowSums = kLanes == 16 ? 2 : 1;  // with the columns' vectors, so many sums that additions overlap
enum Scratch { kKeys, kQueries, kOutputs, kState, kDecays, kDecayedKeys };

// What a token adds to the state: S = decay S + k d^T; with kChannels each row has a decay of its own.
template <int kVectors, bool kChannels>
struct Update {
  std::conditional_t<kChannels, const float*, float> decay;
  const float* k;
  f32v d[kVectors];

  // Both sweeps must round alike, whatever the compiler fuses.
  FASTINFER_INLINE f32v apply(f32v s, int64_t row, int c) const {
    if constexpr (kChannels) {
      return in_register(s * decay[row]) + k[row] * d[c];
    } else {
      return in_register(s * decay) + k[row] * d[c];
    }
  }
};

// S^T k and S^T q.
template <int kVectors>
struct Products {
  f32v k[kVectors], q[kVectors];
};

// Of the state at `from`, or with kUpdate of the updated one, which goes to `to`.
template <bool kUpdate, int kVectors, bool kChannels>
__attribute__((noinline)) void sweep(Columns<const float> from, Columns<float> to,
                                     const Update<kVectors, kChannels>& update, const float* k, const float* q,
                                     int64_t rows, Products<kVectors>& products) {
  f32v k_sums[kRowSums][kVectors] = {}, q_sums[kRowSums][kVectors] = {};
  const Update last = update;
  for (int64_t row = 0; row < rows; row += kRowSums) {
#pragma GCC unroll 2
    for (int r = 0; r < kRowSums; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < kVectors; ++c) {
        f32v s = load(from.data + (row + r) * from.stride + c * kLanes);
        if constexpr (kUpdate) {
          s = last.apply(s, row + r, c);
          store(to.data + (row + r) * to.stride + c * kLanes, s);
        }
        k_sums[r][c] += s * k[row + r];
        q_sums[r][c] += s * q[row + r];
      }
    }
  }
#pragma GCC unroll 4
  for (int c = 0; c < kVectors; ++c) {
    products.k[c] = kRowSums == 1 ? k_sums[0][c] : k_sums[0][c] + k_sums[kRowSums - 1][c];
    products.q[c] = kRowSums == 1 ? q_sums[0][c] : q_sums[0][c] + q_sums[kRowSums - 1][c];
  }
}

// The updated state at `to`, which may be `from`.
template <int kVectors, bool kChannels>
__attribute__((noinline)) void store_state(Columns<const float> from, Columns<float> to,
                                           const Update<kVectors, kChannels>& update, int64_t rows) {
  const Update last = update;
  for (int64_t row = 0; row < rows; ++row) {
#pragma GCC unroll 4
    for (int c = 0; c < kVectors; ++c) {
      store(to.data + row * to.stride + c * kLanes,
            last.apply(load(from.data + row * from.stride + c * kLanes), row, c));
    }
  }
}

// out = x / |x| * scale.
template <class T>
FASTINFER_INLINE void scale_to_length(const T* x, int64_t count, float scale, float* out) {
  f32v squares{};
  for (int64_t i = 0; i < count; i += kLanes) {
    const f32v v = load(x + i);
    squares += v * v;
  }
  const float factor = scale / std::sqrt(reduce_add(squares) + kDeltaNormEps);
  for (int64_t i = 0; i < count; i += kLanes) store(out + i, load(x + i) * factor);
}

FASTINFER_INLINE float dot(const float* a, const float* b, int64_t count) {
  f32v sum{};
  for (int64_t i = 0; i < count; i += kLanes) sum += load(a + i) * load(b + i);
  return reduce_add(sum);
}

// One value head of one sequence; with kChannels each channel of a key has a decay.
template <class T, bool kChannels>
class Head {
 public:
  Head(const GatedDeltaRuleParams& p, int64_t seq, int64_t head)
      : p_(p),
        seq_(seq),
        head_(head),
        keys_(scratch_array<float>(kKeys, kTokens * p.key_dim)),
        queries_(scratch_array<float>(kQueries, kTokens * p.key_dim)),
        outputs_(scratch_array<float>(kOutputs, kTokens * p.value_dim)),
        state_(scratch_array<float>(kState, p.key_dim * p.value_dim)),
        decays_(scratch_array<float>(kDecays, kTokens * (kChannels ? p.key_dim : 1))),
        decayed_keys_(kChannels ? scratch_array<float>(kDecayedKeys, kTokens * p.key_dim) : keys_) {}

  void run() {
    const int64_t begin = p_.slots.query_start[seq_], end = p_.slots.query_start[seq_ + 1];
    for (int64_t first = begin; first < end; first += kTokens) {
      first_ = first;
      count_ = std::min(kTokens, end - first);
      for (int64_t i = 0; i < count_; ++i) prepare(i);
      const int64_t slot = first == begin ? p_.slots.reads[seq_] : p_.slots.writes[first - 1];
      if (first == begin && slot < 0) std::fill_n(state_, p_.key_dim * p_.value_dim, 0.0f);
      int64_t column = 0;
      const auto blocks = [&]<int64_t kWidth>() {
        for (; column + kWidth <= p_.value_dim; column += kWidth) run_columns<kWidth / kLanes>(column, slot);
      };
      if (kLanes == 16 && end - begin == 1) blocks.template operator()<kColumnsAlone>();
      blocks.template operator()<kColumns>();
      if (column < p_.value_dim) run_columns<kDeltaHeadUnit / kLanes>(column, slot);
      for (int64_t i = 0; i < count_; ++i) finish(i);
    }
  }

 private:
  // The keys, queries and gates of a token.
  void prepare(int64_t i) {
    const int64_t token = first_ + i, dim = p_.key_dim, key_head = head_ / (p_.value_heads / p_.key_heads);
    const T* q = static_cast<const T*>(p_.qkv) + token * p_.qkv_stride + key_head * dim;
    float* const query = queries_ + i * dim;
    float* const key = keys_ + i * dim;
    scale_to_length(q, dim, 1.0f / std::sqrt(static_cast<float>(dim)), query);
    scale_to_length(q + p_.key_heads * dim, dim, 1.0f, key);
    key_query_[i] = dot(key, query, dim);
    if constexpr (kChannels) {
      decay_channels(i);
    } else {
      const float step = load_float(p_.a, p_.a_dtype, token * p_.a_stride + head_) + p_.dt_bias[head_];
      const float rate = std::exp(p_.a_log[head_]);
      decays_[i] =
          std::exp(p_.decay_bound == 0.0f ? -rate * softplus(step) : p_.decay_bound / (1.0f + std::exp(-rate * step)));
    }
    const float write = load_float(p_.b, p_.b_dtype, token * p_.b_stride + head_);
    beta_[i] = p_.beta_scale * (1.0f / (1.0f + std::exp(-write)));
  }

  // The decays of a token's channels, by which its query and what the state is multiplied with are scaled.
  void decay_channels(int64_t i) {
    const int64_t token = first_ + i, dim = p_.key_dim;
    const float* const bias = p_.dt_bias + head_ * dim;
    const float rate = std::exp(p_.a_log[head_]);
    float *const query = queries_ + i * dim, *const key = keys_ + i * dim;
    dispatch(p_.a_dtype, [&]<class A>(A) {
      const A* a = static_cast<const A*>(p_.a) + token * p_.a_stride + head_ * dim;
      for (int64_t j = 0; j < dim; j += kLanes) {
        const f32v step = load(a + j) + load(bias + j);
        const f32v decay = exp(p_.decay_bound == 0.0f ? -rate * softplus(step)
                                                      : times_sigmoid(broadcast(p_.decay_bound), rate * step));
        store(decays_ + i * dim + j, decay);
        store(decayed_keys_ + i * dim + j, load(key + j) * decay);
        store(query + j, load(query + j) * decay);
      }
    });
  }

  // `slot` has the state before the first token; -1: scratch memory has it.
  template <int kVectors>
  void run_columns(int64_t column, int64_t slot) {
    const Columns<float> kept{state_ + column * p_.key_dim, kVectors * kLanes};
    Columns<float> at = slot < 0 ? kept : in_slot(slot, column);
    Update<kVectors, kChannels> update{};
    bool updated = true;
    for (int64_t i = 0; i < count_; ++i) {
      const float *k = decayed_keys_ + i * p_.key_dim, *q = queries_ + i * p_.key_dim;
      const float decay = kChannels ? 1.0f : decays_[i];  // of the products
      Products<kVectors> products;
      if (updated) {
        sweep<false>({at.data, at.stride}, at, update, k, q, p_.key_dim, products);
      } else {
        sweep<true>({at.data, at.stride}, kept, update, k, q, p_.key_dim, products);
        at = kept;
      }
      const int64_t token = first_ + i;
      const T* v = static_cast<const T*>(p_.qkv) + token * p_.qkv_stride + 2 * p_.key_heads * p_.key_dim +
                   head_ * p_.value_dim + column;
      float* const out = outputs_ + i * p_.value_dim + column;
      if constexpr (kChannels) {
        update.decay = decays_ + i * p_.key_dim;
      } else {
        update.decay = decay;
      }
      update.k = keys_ + i * p_.key_dim;
#pragma GCC unroll 4
      for (int c = 0; c < kVectors; ++c) {
        update.d[c] = (load(v + c * kLanes) - products.k[c] * decay) * beta_[i];
        store(out + c * kLanes, in_register(products.q[c] * decay) + update.d[c] * key_query_[i]);
      }
      const int64_t write = p_.slots.writes[token];
      updated = write >= 0 || i + 1 == count_;
      if (!updated) continue;
      const Columns<float> to = write >= 0 ? in_slot(write, column) : kept;
      store_state({at.data, at.stride}, to, update, p_.key_dim);
      at = to;
    }
  }

  // The gated RMSNorm of a token's outputs.
  void finish(int64_t i) const {
    const int64_t token = first_ + i, dim = p_.value_dim;
    const float* const o = outputs_ + i * dim;
    const float scale = 1.0f / std::sqrt(dot(o, o, dim) / static_cast<float>(dim) + p_.eps);
    const T* z = static_cast<const T*>(p_.z) + token * p_.z_stride + head_ * dim;
    T* const out = static_cast<T*>(p_.out) + (token * p_.value_heads + head_) * dim;
    dispatch(p_.norm_weight_dtype, [&]<class W>(W) {
      const W* weight = static_cast<const W*>(p_.norm_weight);
      for (int64_t j = 0; j < dim; j += kLanes) {
        const f32v gate = load(z + j);
        const f32v factor = times_sigmoid(p_.sigmoid_gate ? broadcast(1.0f) : gate, gate);
        store(out + j, load(o + j) * scale * load(weight + j) * factor);
      }
    });
  }

  Columns<float> in_slot(int64_t slot, int64_t column) const {
    return {p_.state + slot * p_.slots.stride + head_ * p_.key_dim * p_.value_dim + column, p_.value_dim};
  }

  const GatedDeltaRuleParams& p_;
  const int64_t seq_, head_;
  int64_t first_, count_;      // the tokens at work
  float* const keys_;          // [kTokens, key_dim], of length 1
  float* const queries_;       // [kTokens, key_dim], of length 1 / sqrt(key_dim); with kChannels times the decays
  float* const outputs_;       // [kTokens, value_dim]
  float* const state_;         // blocks of columns, each [key_dim, kColumns] or another width
  float* const decays_;        // [kTokens]; with kChannels [kTokens, key_dim]
  float* const decayed_keys_;  // with kChannels [kTokens, key_dim], keys times the decays; else the keys
  float beta_[kTokens], key_query_[kTokens];
};

}  // namespace

void gated_delta_rule(const GatedDeltaRuleParams& p) {
  dispatch(p.dtype, [&]<class T>(T) {
    parallel_for(p.slots.seqs * p.value_heads, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t seq = i / p.value_heads, head = i % p.value_heads;
        if (p.channel_decay) {
          Head<T, true>(p, seq, head).run();
        } else {
          Head<T, false>(p, seq, head).run();
        }
      }
    });
  });
}

}  // namespace fastinfer::cpu::FASTINFER_ISA
