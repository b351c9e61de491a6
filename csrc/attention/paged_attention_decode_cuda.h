// Flash attention of up to 16 query rows, which the warps share: each has 16 positions of a tile (at head size 256 two
// warps have the same ones, and half of V's columns each; at 512 all have the same, and a quarter each). The next
// item's tiles arrive while the present one ends.
//
// A quantized cache is widened in registers. An element of ldmatrix is then two codes of eight bits or four of four,
// and one register of it serves the products of so many columns of V, or of so many times as many columns of K; which
// columns those are is of no matter to the sums, as long as Q's are permuted alike and the results' are put right.
#pragma once

#include "attention/paged_attention_codes_cuda.h"
#include "attention/paged_attention_queries_cuda.h"
#include "attention/paged_attention_results_cuda.h"
#include "attention/paged_attention_softmax_cuda.h"
#include "attention/paged_attention_tile_cuda.h"

namespace fastinfer::cuda {

// Shared memory of decode.
template <class T, CacheQuantization kKind, int kHeadDim>
struct DecodeShared {
  using Queries = QueryLoader<T, kKind, kHeadDim, true>;
  using Results = SharedResults<kHeadDim, kv_tile(kHeadDim)>;
  static constexpr int kStageBytes = CacheRow<kKind, kHeadDim>::kStageBytes;
  static constexpr int kQueryBytes = kDecodeRows * Queries::kSharedChunks * 16;
  // Stages of 16 bits leave no room for results: they take the last tile's stage.
  static constexpr bool kShareStage = kKind == CacheQuantization::kNone;
  static constexpr int kResultBytes = kShareStage ? 0 : Results::kBytes;
  static constexpr int kFree =
      static_cast<int>(attention_shared_bytes(kHeadDim)) - kQueryBytes - Results::kStatisticsBytes - kResultBytes;
  static constexpr int kStages = kShareStage ? 2 : kFree / kStageBytes < 4 ? kFree / kStageBytes : 4;
  static_assert(kStages >= 2 && kStages * kStageBytes <= kFree);
  static_assert(!kShareStage || Results::kBytes <= kStageBytes);

  __device__ static unsigned char* queries() {
    return dynamic_shared();
  }
  __device__ static float* statistics() {
    return reinterpret_cast<float*>(queries() + kQueryBytes);
  }
  __device__ static Stage<kKind, kHeadDim> stage(int index) {
    return Stage<kKind, kHeadDim>::whole(queries() + kQueryBytes + Results::kStatisticsBytes + kResultBytes +
                                         index * kStageBytes);
  }
  // Of an item whose last tile was in this stage.
  __device__ static Results results(int last_stage) {
    unsigned char* const memory = kShareStage ? stage(last_stage).memory : stage(0).memory - kResultBytes;
    return {reinterpret_cast<float*>(memory), statistics()};
  }
  // What the queries were divided by, until the warps have read it.
  __device__ static float* query_factors() {
    return statistics();
  }
};

template <class T, CacheQuantization kKind, int kHeadDim>
class DecodeAttention {
  using Row = CacheRow<kKind, kHeadDim>;
  using Shared = DecodeShared<T, kKind, kHeadDim>;
  using Factors = CodeFactors<T, kKind>;
  using Key = KeyProduct<T, kKind>;
  using Value = ValueProduct<T, kKind>;
  using Softmax = RowSoftmax<1, true, !std::is_same_v<T, Key>>;
  static constexpr bool kQuantized = kKind != CacheQuantization::kNone, kInt4 = Row::kInt4;
  static constexpr int kTile = kv_tile(kHeadDim);
  static constexpr int kColumnWarps = kAttentionWarps * 16 / kTile;  // warps with the same positions
  static constexpr int kColumns = kHeadDim / kColumnWarps;
  static constexpr int kCodes = kKind == CacheQuantization::kNone ? 8 : kInt4 ? 32 : 16;  // of a chunk
  static constexpr int kSteps = Shared::Queries::kSharedChunks / 2;                       // of the product Q K^T
  static constexpr bool kKeepQueries = kHeadDim <= 256;                                   // in registers
  static constexpr int kValueChunks = (kColumns + kCodes - 1) / kCodes;
  static constexpr int kValueTiles = kValueChunks * kCodes / 8;
  static constexpr int kMiddle = 8;  // of four bits
  static constexpr int kGroups = kInt4 ? (kColumns + kInt4ValueGroup - 1) / kInt4ValueGroup : 1;

 public:
  static constexpr int kPartials = kTile / 16;

  __device__ DecodeAttention(const PagedAttentionParams& p, const WorkItem& item)
      : position0_(warp() / kColumnWarps * 16),
        column0_(warp() % kColumnWarps * kColumns),
        softmax_(p, item, Shared::query_factors()) {
    if constexpr (kKeepQueries) {
      for (int k = 0; k < kSteps; ++k) load_queries(k, q_[k]);
    }
  }

  // Adds a tile whose first position is `first`.
  __device__ void add(const Stage<kKind, kHeadDim>& stage, int first) {
    if (!softmax_.sees(first + position0_, 16)) return;
    Logits<1, 16> s{};
    multiply_keys(stage, s.values[0]);
    if constexpr (Row::kScaled) s.scale_positions(stage.key_scales() + position0_, Factors::kKey);
    softmax_.update(s, first + position0_, [&](int, int i, float factor) {
      for (auto& o : o_) o[2 * i] *= factor, o[2 * i + 1] *= factor;
      for (auto& middle : middle_) middle[i] *= factor;
    });
    if constexpr (kInt4) return multiply_int4_values(stage, s);
    if constexpr (Row::kScaled) s.scale_positions(stage.value_scales() + position0_, Factors::kProbability);
    uint32_t a[4];
    s.template factors<Value>(0, 0, a);
#pragma unroll
    for (int c = 0; c < kValueChunks; c += 2) {
      uint32_t x[4];
      load_chunks<true>(stage.values(), column0_ / kCodes, c, kValueChunks, x);
      if constexpr (kKind == CacheQuantization::kNone) {
        mma<Value>(o_[c], a, {x[0], x[1]});
        mma<Value>(o_[c + 1], a, {x[2], x[3]});
      } else {
#pragma unroll
        for (int j = 0; j < 2 && c + j < kValueChunks; ++j) {
          uint32_t low[2], high[2];  // of positions 0 .. 7 and 8 .. 15
          widen<Value, kKind, true>(x[2 * j], low);
          widen<Value, kKind, true>(x[2 * j + 1], high);
          mma<Value>(o_[2 * (c + j)], a, {low[0], high[0]});
          mma<Value>(o_[2 * (c + j) + 1], a, {low[1], high[1]});
        }
      }
    }
  }

  // A row of a warp's partial result lies at its first position + row.
  __device__ void store(const typename Shared::Results& results) const {
    const int own = static_cast<int>(opaque(threadIdx.x) % kWarpSize);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = position0_ + own / 4 + 8 * i;
      store_values(results, row, own % 4, i);
      const float sum = softmax_.sum(0, i);
      if (own % 4 == 0 && column0_ == 0) results.maximum(row) = softmax_.maximum(0, i), results.sum(row) = sum;
    }
  }

 private:
  __device__ static int lane() {
    return static_cast<int>(threadIdx.x % kWarpSize);
  }
  __device__ static int warp() {
    return static_cast<int>(threadIdx.x / kWarpSize);
  }

  // Chunks c and c + 1, counted from `first`, of the warp's 16 rows: positions 0 .. 7 and 8 .. 15 of each. If there are
  // c + 1 only, what comes twice is not to be used.
  template <bool kTransposed>
  __device__ void load_chunks(const unsigned char* tile, int first, int c, int count, uint32_t (&x)[4]) const {
    const int row = position0_ + lane() % 16;
    const void* const from = tile + chunk_offset<Row::kChunks>(row, first + c, c + 1 < count ? lane() / 16 : 0);
    if constexpr (kTransposed) {
      ldmatrix_transposed(x, from);
    } else {
      ldmatrix(x, from);
    }
  }

  __device__ static void load_queries(int k, uint32_t (&q)[4]) {
    ldmatrix(q, Shared::queries() + chunk_offset<Shared::Queries::kSharedChunks>(lane() % 16, 2 * k, lane() / 16));
  }

  // The queries of a step, from registers or else by way of `memory`.
  __device__ const uint32_t (&queries(int k, uint32_t (&memory)[4]) const)[4] {
    if constexpr (kKeepQueries) return q_[k];
    load_queries(k, memory);
    return memory;
  }

  // S = Q K^T
  __device__ void multiply_keys(const Stage<kKind, kHeadDim>& stage, float (&s)[2][4]) const {
    if constexpr (!kQuantized) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        uint32_t b[4];
        load_chunks<false>(stage.keys(), 0, 2 * k, Row::kChunks, b);
        uint32_t memory[4];
        const auto& q = queries(k, memory);
        mma<Key>(s[0], q, {b[0], b[2]});
        mma<Key>(s[1], q, {b[1], b[3]});
      }
    } else {
#pragma unroll
      for (int c = 0; c < Row::kChunks; c += 2) {
        uint32_t x[4];
        load_chunks<false>(stage.keys(), 0, c, Row::kChunks, x);
#pragma unroll
        for (int j = 0; j < 2 && c + j < Row::kChunks; ++j) {
          uint32_t memory[2][4];
          const auto& q = queries(kInt4 ? 2 * (c + j) : c + j, memory[0]);
          const auto& q_high = kInt4 ? queries(2 * (c + j) + 1, memory[1]) : q;
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            if constexpr (kInt4) {
              uint32_t b[4];
              const int group = min(2 * (c + j) + lane() % 4 / 2, Row::kKeyScales - 1);
              const int position = position0_ + 8 * n + lane() / 4;
              widen_int4_keys(x[2 * j + n], stage.key_scales()[position * Row::kKeyStride + group], b);
              mma<Key>(s[n], q, {b[0], b[1]});
              mma<Key>(s[n], q_high, {b[2], b[3]});
            } else {
              uint32_t b[2];
              widen<Key, kKind, false>(x[2 * j + n], b);
              mma<Key>(s[n], q, b);
            }
          }
        }
      }
    }
  }

  // O += P V, where V is scale (q - 8) + middle: the scale goes into P, and the middle meets a row's probabilities once
  // a group. Without the 8, rounding P would cost twice as much.
  __device__ void multiply_int4_values(const Stage<kKind, kHeadDim>& stage, const Logits<1, 16>& p) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      Logits<1, 16> scaled;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int position = position0_ + 8 * n + lane() % 4 * 2 + c;
          const uint32_t word = stage.value_scales()[position * Row::kValueScales + column0_ / kInt4ValueGroup + g];
          __half2 pair;
          memcpy(&pair, &word, sizeof pair);
          const float scale = __low2float(pair), middle = fmaf(scale, kMiddle, __high2float(pair));
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const float probability = p.values[0][n][2 * i + c];
            scaled.values[0][n][2 * i + c] = probability * (scale * Factors::kProbability);
            middle_[g][i] += probability * middle;
          }
        }
      }
      uint32_t a[4];
      scaled.template factors<Value>(0, 0, a);
      constexpr int kGroupChunks = kInt4ValueGroup / 32;
      uint32_t x[4];
      load_chunks<true>(stage.values(), column0_ / 32, g * kGroupChunks, kValueChunks, x);
#pragma unroll
      for (int j = 0; j < kGroupChunks && g * kGroupChunks + j < kValueChunks; ++j) {
        uint32_t low[4], high[4];
        widen_int4_pairs<kMiddle>(x[2 * j], low);
        widen_int4_pairs<kMiddle>(x[2 * j + 1], high);
#pragma unroll
        for (int i = 0; i < 4; ++i) mma<Value>(o_[4 * (g * kGroupChunks + j) + i], a, {low[i], high[i]});
      }
    }
  }

  // Lane t of four has kCodes / 4 columns in a row of a chunk, each fragment's two of them half as far apart.
  __device__ void store_values(const typename Shared::Results& results, int row, int t, int i) const {
    if constexpr (!kQuantized) {
#pragma unroll
      for (int n = 0; n < kValueTiles; ++n) {
        store_vector(results.at(row, column0_ + n * 8 + t / 2 * 4) + t % 2 * 2,
                     Vector<float, 2>{o_[n][2 * i], o_[n][2 * i + 1]});
      }
    } else if constexpr (!kInt4) {
#pragma unroll
      for (int c = 0; c < kValueChunks; ++c) {
        const auto &even = o_[2 * c], &odd = o_[2 * c + 1];
        Vector<float, 4> v{even[2 * i], odd[2 * i], even[2 * i + 1], odd[2 * i + 1]};
        for (float& value : v.values) value *= Factors::kResult;
        store_vector(results.at(row, column0_ + 16 * c + 4 * t), v);
      }
    } else {
#pragma unroll
      for (int c = 0; c < kValueChunks; ++c) {
        const float middle = Softmax::sum_of_four(middle_[c * 32 / kInt4ValueGroup][i]);
        const int column = column0_ + 32 * c + 8 * t;
        if (column >= kHeadDim) continue;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          Vector<float, 4> v;
          for (int k = 0; k < 4; ++k) v.values[k] = o_[4 * c + k][2 * i + half] * Factors::kResult + middle;
          store_vector(results.at(row, column + 4 * half), v);
        }
      }
    }
  }

  int position0_, column0_;  // of the warp
  uint32_t q_[kKeepQueries ? kSteps : 1][4];
  float o_[kValueTiles][4] = {};
  float middle_[kGroups][2] = {};  // sums of probabilities times middles, of this lane's positions
  Softmax softmax_;
};

// Does items from the cursor on, as long as they are decode's. Leaves the cursor at the first that is not.
template <class T, CacheQuantization kKind, int kHeadDim>
__device__ void decode(const PagedAttentionParams& p, WorkCursor& cursor) {
  using Shared = DecodeShared<T, kKind, kHeadDim>;
  using Queries = typename Shared::Queries;
  TileLoader<kKind, kHeadDim> loader(p);
  WorkCursor ahead = cursor;  // what the loader has not begun
  const auto load = [&](int stage) {
    if (loader.ended() && !ahead.ended()) {
      const WorkItem item(p, ahead.at, ahead.units);
      if (item.decodes()) {
        loader.begin(item);
        ahead.advance(p, item.tiles);
      } else {
        ahead.units = 0;
      }
    }
    if (!loader.ended()) {
      loader.copy(Shared::stage(stage));
      loader.next();
    }
    cp_async_commit();
  };
  for (int stage = 0; stage < Shared::kStages; ++stage) load(stage);
  typename Queries::Chunk q[Queries::kSteps];
  const auto fetch = [&](const WorkItem& item) {
    for (int step = 0; step < Queries::kSteps; ++step) q[step] = Queries::fetch(p, item, step);
  };
  fetch(WorkItem(p, cursor.at, cursor.units));
  for (int stage = 0;;) {
    const WorkItem item(p, cursor.at, cursor.units);
    const int left = cursor.units;
    for (int step = 0; step < Queries::kSteps; ++step) {
      Queries::store(q[step], step, Shared::queries(), Shared::query_factors());
    }
    __syncthreads();
    DecodeAttention<T, kKind, kHeadDim> attention(p, item);
    for (int tile = 0;; stage = (stage + 1) % Shared::kStages) {
      cp_async_wait<Shared::kStages - 1>();
      __syncthreads();
      attention.add(Shared::stage(stage), item.first_position(kHeadDim) + tile * kv_tile(kHeadDim));
      __syncthreads();
      const bool last = ++tile == item.tiles;
      if (!last || !Shared::kShareStage) load(stage);
      if (last) break;
    }
    cursor.advance(p, item.tiles);
    bool more = !cursor.ended();
    if (more) {
      const WorkItem next(p, cursor.at, cursor.units);
      more = next.decodes();
      if (more) fetch(next);
    }
    const auto results = Shared::results(stage);
    attention.store(results);
    __syncthreads();
    write_results<T, kHeadDim, true>(p, item, left, results, attention.kPartials);
    __syncthreads();  // shared memory is used again
    if (Shared::kShareStage) load(stage);
    if (!more) break;
    stage = (stage + 1) % Shared::kStages;
  }
  cp_async_wait<0>();
}

}  // namespace fastinfer::cuda
