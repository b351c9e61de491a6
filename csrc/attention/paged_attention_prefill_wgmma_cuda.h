// Flash attention of a whole row tile on Hopper's matrix products (sm_90a), in place of PrefillAttention. The block is
// one warpgroup. It has two tiles of 64 rows, of which each warp has 16 rows. The product of one runs while the softmax
// of the other is computed; where both wait, the multiprocessor's other block multiplies:
//
//   products   S0 = Q0 K^T | S1 = Q1 K^T | O0 += P0 V | O1 += P1 V
//   threads                | P0 of S0    | P1 of S1   |
//
// Operands come from shared memory but for P, whose registers are those of S in 16 bits. Three places in shared memory
// hold, in turn, K, V and the next K: a copy begins as soon as the place's former tile is multiplied, about a tile
// ahead of its use. A quantized tile is widened as in PrefillAttention.
#pragma once

#include "attention/paged_attention_prefill_shared_cuda.h"
#include "attention/paged_attention_softmax_cuda.h"
#include "common/cuda/wgmma.h"

namespace fastinfer::cuda {

template <class T, CacheQuantization kKind, int kHeadDim>
class WgmmaPrefillAttention {
  using Row = CacheRow<kKind, kHeadDim>;
  using Shared = PrefillShared<T, kKind, kHeadDim>;
  using Queries = QueryLoader<T, kKind, kHeadDim, false>;
  using Loader = TileLoader<kKind, kHeadDim, Row::kInt4 ? 1 : 2>;  // with more, four bits spill registers
  using Factors = CodeFactors<T, kKind>;
  using Key = KeyProduct<T, kKind>;
  using Value = ValueProduct<T, kKind>;
  using Softmax = RowSoftmax<1, false, !std::is_same_v<T, Key>, 1, !Row::kScaled>;
  static constexpr bool kQuantized = Shared::kQuantized;
  static constexpr int kRows = row_tile(kHeadDim), kTile = kv_tile(kHeadDim);
  static constexpr int kTileRows = 64;  // of a product
  static constexpr int kPlaces = Shared::kTiles;
  static constexpr int kRowBytes = 128;  // of a panel
  static_assert(kRows == 2 * kTileRows && kHeadDim % 64 == 0 && kAttentionThreads == 128);

 public:
  // Leaves its results in shared memory.
  __device__ static void run(const PagedAttentionParams& p, const WorkItem& item) {
    Loader loader(p);
    loader.begin(item);
    if constexpr (kQuantized) {
      loader.copy(Shared::stage(loader.tile()));
    } else {
      loader.copy_panels(p.k_cache, Shared::tile(0));
    }
    Queries::load_rows(p, item, Shared::queries(), Shared::query_factors());
    cp_async_commit();
    if constexpr (!kQuantized) {
      loader.copy_panels(p.v_cache, Shared::tile(1));
      cp_async_commit();
    }
    loader.next();
    __syncthreads();  // the factors are there
    WgmmaPrefillAttention(p, item).add_tiles(loader);
    __syncthreads();
  }

 private:
  __device__ WgmmaPrefillAttention(const PagedAttentionParams& p, const WorkItem& item)
      : p_(p),
        softmax_{Softmax(p, item, Shared::query_factors()), Softmax(p, item, Shared::query_factors(), kTileRows)} {}

  // The loader has begun the copy of the first tile.
  __device__ void add_tiles(Loader& loader) {
    int place = 0;  // of K
    for (bool more = true; more; place = next_place(next_place(place))) {
      const int tile = loader.tile() - 1;
      more = !loader.ended();
      begin_tile(tile);
      Logits<1, kTile> s[2];
      multiply_keys(s[0], 0, place);
      multiply_keys(s[1], 1, place);
      if constexpr (kQuantized) {
        if (more) loader.copy(Shared::stage(tile + 1)), loader.next();
      } else {
        if (more) loader.copy_panels(p_.k_cache, Shared::tile(next_place(next_place(place))));
      }
      cp_async_commit();

      uint32_t p[2][kTile / 16][4];
      wgmma_wait<1>(s[0].values);
      probabilities(s[0], 0, tile, p[0]);
      if constexpr (!kQuantized) {
        wgmma_wait<0>(s[1].values);  // all keys are multiplied
        cp_async_wait<1>();
        fence_async_shared();
        __syncthreads();
      }
      multiply_values(p[0], 0, next_place(place));
      if constexpr (!kQuantized) {
        if (more) loader.copy_panels(p_.v_cache, Shared::tile(place)), loader.next();
        cp_async_commit();
      } else {
        wgmma_wait<1>(s[1].values);
      }
      probabilities(s[1], 1, tile, p[1]);
      multiply_values(p[1], 1, next_place(place));
      wgmma_wait<0>(o_[0], o_[1], p[0], p[1]);
    }
    cp_async_wait<0>();
    __syncthreads();
    store(Shared::results());
  }

  __device__ static int next_place(int place) {
    return place + 1 == kPlaces ? 0 : place + 1;
  }

  // Until the tile's K, or both of a quantized one, can be multiplied.
  __device__ static void begin_tile(int tile) {
    if constexpr (kQuantized) {
      cp_async_wait<0>();
      __syncthreads();
      Shared::widen_tile(Shared::stage(tile));
    } else {
      cp_async_wait<1>();
    }
    fence_async_shared();
    __syncthreads();
  }

  // S = Q K^T for a tile of rows
  __device__ static void multiply_keys(Logits<1, kTile>& s, int r, int place) {
    auto& sums = reinterpret_cast<float (&)[kTile / 2]>(s.values);
    const uint64_t q = wgmma_matrix(Shared::queries()) + r * kTileRows * kRowBytes / 16;
    const uint64_t k = wgmma_matrix(Shared::tile(place));
    wgmma_fence(sums);
#pragma unroll
    for (int i = 0; i < kHeadDim / 16; ++i) {
      const int panel = i / 4 * kRowBytes, column = i % 4 * 32;
      wgmma<Key, kTile>(sums, q + (panel * kRows + column) / 16, k + (panel * kTile + column) / 16, i > 0);
    }
    wgmma_commit();
  }

  // The probabilities of a tile of rows, as factors of a product.
  __device__ void probabilities(Logits<1, kTile>& s, int r, int tile, uint32_t (&p)[kTile / 16][4]) {
    const int first = tile * kTile;
    if (softmax_[r].sees(first, kTile)) {
      if constexpr (Row::kScaled) s.scale_positions(Shared::stage(tile).key_scales(), Factors::kKey);
      softmax_[r].update(s, first, [&](int, int i, float factor) {
#pragma unroll
        for (int n = 0; n < kHeadDim / 8; ++n) o_[r][4 * n + 2 * i] *= factor, o_[r][4 * n + 2 * i + 1] *= factor;
      });
      if constexpr (Row::kScaled) s.scale_positions(Shared::stage(tile).value_scales(), Factors::kProbability);
#pragma unroll
      for (int k = 0; k < kTile / 16; ++k) s.template factors<Value>(0, k, p[k]);
    } else {
#pragma unroll
      for (int k = 0; k < kTile / 16; ++k) {
        for (uint32_t& pair : p[k]) pair = 0;
      }
    }
  }

  // O += P V for a tile of rows
  __device__ void multiply_values(uint32_t (&p)[kTile / 16][4], int r, int place) {
    const uint64_t v = wgmma_matrix(Shared::tile(place), kTile * kRowBytes);
    wgmma_fence(o_[r], p);
#pragma unroll
    for (int k = 0; k < kTile / 16; ++k) wgmma<Value, kHeadDim, true>(o_[r], p[k], v + k * 16 * kRowBytes / 16);
    wgmma_commit();
  }

  __device__ void store(const typename Shared::Results& results) const {
    constexpr float kFactor = Row::kScaled ? Factors::kResult : 1.0f;
    const int thread = static_cast<int>(opaque(threadIdx.x)), t = thread % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = kTileRows * r + thread / kWarpSize * 16 + thread % kWarpSize / 4 + 8 * i;
#pragma unroll
        for (int n = 0; n < kHeadDim / 8; ++n) {
          store_vector(results.at(row, n * 8 + t / 2 * 4) + t % 2 * 2,
                       Vector<float, 2>{o_[r][4 * n + 2 * i] * kFactor, o_[r][4 * n + 2 * i + 1] * kFactor});
        }
        const float sum = softmax_[r].sum(0, i);
        if (t == 0) results.maximum(row) = softmax_[r].maximum(0, i), results.sum(row) = sum;
      }
    }
  }

  const PagedAttentionParams& p_;
  float o_[2][kHeadDim / 2] = {};  // as wgmma has them
  Softmax softmax_[2];
};

}  // namespace fastinfer::cuda
