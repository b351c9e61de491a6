// Flash attention of a whole row tile, of which each warp has 32 rows (16 from head size 256 on; at 512 two warps have
// the same ones, and half of V's columns each: both compute all their logits). K and V have one place each in shared
// memory: one arrives while the other is multiplied. A quantized tile, which is smaller, arrives as a whole meanwhile;
// all warps then widen a part of it for all.
#pragma once

#include "attention/paged_attention_prefill_shared_cuda.h"
#include "attention/paged_attention_softmax_cuda.h"

namespace fastinfer::cuda {

template <class T, CacheQuantization kKind, int kHeadDim>
class PrefillAttention {
  using Row = CacheRow<kKind, kHeadDim>;
  using Shared = PrefillShared<T, kKind, kHeadDim>;
  using Queries = QueryLoader<T, kKind, kHeadDim, false>;
  using Loader = TileLoader<kKind, kHeadDim, Row::kInt4 ? 1 : 2>;  // with more, four bits spill registers
  using Factors = CodeFactors<T, kKind>;
  using Key = KeyProduct<T, kKind>;
  using Value = ValueProduct<T, kKind>;
  static constexpr bool kQuantized = Shared::kQuantized;
  static constexpr int kRows = row_tile(kHeadDim), kTile = kv_tile(kHeadDim);
  static constexpr int kColumnWarps = kHeadDim > 256 ? 2 : 1;  // warps with the same rows
  static constexpr int kRowTiles = kRows * kColumnWarps / (16 * kAttentionWarps);
  static constexpr int kChunks = Shared::kChunks;
  static constexpr int kOwnChunks = kChunks / kColumnWarps;
  static constexpr int kSteps = kHeadDim / 16;          // of the product Q K^T
  static constexpr bool kKeepQueries = kHeadDim <= 80;  // in registers, where there is room

 public:
  // Leaves its results in shared memory.
  __device__ static void run(const PagedAttentionParams& p, const WorkItem& item) {
    Loader loader(p);
    loader.begin(item);
    if constexpr (kQuantized) {
      loader.copy(Shared::stage(loader.tile()));
      loader.next();
    } else {
      loader.copy_panels(p.k_cache, Shared::tile(0));
    }
    Queries::load_rows(p, item, Shared::queries(), Shared::query_factors());
    cp_async_commit();
    if constexpr (kKeepQueries) cp_async_wait<0>();
    __syncthreads();  // the factors are there, and queries that are kept
    PrefillAttention(p, item).add_tiles(loader);
    __syncthreads();
  }

 private:
  __device__ PrefillAttention(const PagedAttentionParams& p, const WorkItem& item)
      : p_(p), softmax_(p, item, Shared::query_factors()) {
    if constexpr (kKeepQueries) {
      for (int k = 0; k < kSteps; ++k) load_queries(q_[k], k, lane());
    }
  }

  // The loader has begun the copy of the first tile, or of its K.
  __device__ void add_tiles(Loader& loader) {
    for (bool more = true; more;) {
      const int tile = loader.tile() - kQuantized, first = tile * kTile;
      const bool sees = softmax_.sees(first, kTile);
      cp_async_wait<0>();
      __syncthreads();
      if constexpr (kQuantized) {
        Shared::widen_tile(Shared::stage(tile));
        __syncthreads();
        more = !loader.ended();
        if (more) loader.copy(Shared::stage(tile + 1)), loader.next();
      } else {
        loader.copy_panels(p_.v_cache, Shared::tile(1));
        loader.next();
        more = !loader.ended();
      }
      cp_async_commit();
      uint32_t probabilities[kTile / 16][kRowTiles][4];
      if (sees) {
        Logits<kRowTiles, kTile> s{};
        multiply_keys(s);
        if constexpr (Row::kScaled) s.scale_positions(Shared::stage(tile).key_scales(), Factors::kKey);
        softmax_.update(s, first, [&](int r, int i, float factor) {
          for (auto& o : o_[r]) o[2 * i] *= factor, o[2 * i + 1] *= factor;
        });
        if constexpr (Row::kScaled) s.scale_positions(Shared::stage(tile).value_scales(), Factors::kProbability);
#pragma unroll
        for (int k = 0; k < kTile / 16; ++k) {
          for (int r = 0; r < kRowTiles; ++r) s.template factors<Value>(r, k, probabilities[k][r]);
        }
      }
      if constexpr (!kQuantized) {
        cp_async_wait<0>();
        __syncthreads();
        if (more) loader.copy_panels(p_.k_cache, Shared::tile(0));
        cp_async_commit();
      }
      if (sees) multiply_values(probabilities);
    }
    cp_async_wait<0>();
    __syncthreads();
    store(Shared::results());
  }

  // Addresses are made again in each tile: there are no registers to keep them.
  __device__ static int lane() {
    return static_cast<int>(opaque(threadIdx.x) % kWarpSize);
  }

  // The warp's first row.
  __device__ static int row0() {
    return static_cast<int>(opaque(threadIdx.x) / kWarpSize / kColumnWarps) * 16 * kRowTiles;
  }

  // The first chunk of V's columns that the warp has.
  __device__ static int chunk0() {
    if constexpr (kColumnWarps == 1) return 0;
    return static_cast<int>(opaque(threadIdx.x) / kWarpSize % kColumnWarps) * kOwnChunks;
  }

  __device__ void load_queries(uint32_t (&a)[kRowTiles][4], int k, int lane) const {
    const int row0 = this->row0();
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
      ldmatrix(a[r], Shared::queries() + panel_offset<kChunks, kRows>(row0 + 16 * r + lane % 16, 2 * k, lane / 16));
    }
  }

  // S = Q K^T
  __device__ void multiply_keys(Logits<kRowTiles, kTile>& s) {
    const int lane = this->lane();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      if constexpr (!kKeepQueries) load_queries(q_[0], k, lane);
      const auto& a = q_[kKeepQueries ? k : 0];
#pragma unroll
      for (int n = 0; n < kTile / 16; ++n) {
        uint32_t b[4];
        const int row = n * 16 + lane / 16 * 8 + lane % 8;
        ldmatrix(b, Shared::tile(0) + panel_offset<kChunks, kTile>(row, 2 * k, lane / 8 % 2));
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
          mma<Key>(s.values[r][2 * n], a[r], {b[0], b[1]});
          mma<Key>(s.values[r][2 * n + 1], a[r], {b[2], b[3]});
        }
      }
    }
  }

  // O += P V
  __device__ void multiply_values(const uint32_t (&p)[kTile / 16][kRowTiles][4]) {
    const int lane = this->lane();
    const unsigned char* const values = Shared::tile(1) + panel_offset<kChunks, kTile>(0, chunk0());
#pragma unroll
    for (int k = 0; k < kTile / 16; ++k) {
#pragma unroll
      for (int n = 0; n < kOwnChunks / 2; ++n) {
        uint32_t b[4];
        const int row = k * 16 + lane % 16;
        ldmatrix_transposed(b, values + panel_offset<kChunks, kTile>(row, 2 * n, lane / 16));
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
          mma<Value>(o_[r][2 * n], p[k][r], {b[0], b[1]});
          mma<Value>(o_[r][2 * n + 1], p[k][r], {b[2], b[3]});
        }
      }
    }
  }

  __device__ void store(const typename Shared::Results& results) const {
    constexpr float kFactor = Row::kScaled ? Factors::kResult : 1.0f;
    const int lane = this->lane(), t = lane % 4;
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = row0() + 16 * r + lane / 4 + 8 * i;
#pragma unroll
        for (int n = 0; n < kOwnChunks; ++n) {
          const auto& o = o_[r][n];
          store_vector(results.at(row, (chunk0() + n) * 8 + t / 2 * 4) + t % 2 * 2,
                       Vector<float, 2>{o[2 * i] * kFactor, o[2 * i + 1] * kFactor});
        }
        const float sum = softmax_.sum(r, i);
        if (t == 0 && chunk0() == 0) results.maximum(row) = softmax_.maximum(r, i), results.sum(row) = sum;
      }
    }
  }

  const PagedAttentionParams& p_;
  uint32_t q_[kKeepQueries ? kSteps : 1][kRowTiles][4];
  float o_[kRowTiles][kOwnChunks][4] = {};
  RowSoftmax<kRowTiles, false, !std::is_same_v<T, Key>, kColumnWarps> softmax_;
};

}  // namespace fastinfer::cuda
