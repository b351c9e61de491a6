// Shared memory of prefill: the queries of a row tile, tiles of K and V in 16 bits, and a quantized tile, of which all
// threads make one in 16 bits.
#pragma once

#include "attention/paged_attention_codes_cuda.h"
#include "attention/paged_attention_queries_cuda.h"
#include "attention/paged_attention_results_cuda.h"
#include "attention/paged_attention_tile_cuda.h"

namespace fastinfer::cuda {

template <class T, CacheQuantization kKind, int kHeadDim>
struct PrefillShared {
  using Row = CacheRow<kKind, kHeadDim>;
  using Results = SharedResults<kHeadDim, row_tile(kHeadDim)>;
  static constexpr bool kQuantized = kKind != CacheQuantization::kNone;
  static constexpr int kChunks = kHeadDim / 8;
  static constexpr int kTile = kv_tile(kHeadDim);
  static constexpr int kQueryBytes = row_tile(kHeadDim) * kHeadDim * 2;
  static constexpr int kTileBytes = kTile * kHeadDim * 2;
  static constexpr int kTiles = kQuantized ? 2 : 3;  // in 16 bits
  // Scales of eight bits are used after the next tile's copy has begun.
  static constexpr int kScaleStages = Row::kScaled ? 2 : 1;
  static constexpr int kStageBytes = kQuantized ? 2 * Row::kTileBytes + kScaleStages * Row::kScaleBytes : 0;
  static constexpr int kBytes = static_cast<int>(attention_shared_bytes(kHeadDim));
  static_assert(kQueryBytes + kTiles * kTileBytes + kStageBytes <= kBytes);
  static_assert(Results::kBytes + Results::kStatisticsBytes <= kBytes);

  __device__ static unsigned char* queries() {
    return dynamic_shared();
  }
  // Tiles in 16 bits; if the cache is quantized, 0 is that of K and 1 that of V.
  __device__ static unsigned char* tile(int index) {
    return queries() + kQueryBytes + index * kTileBytes;
  }
  // The quantized tile.
  __device__ static Stage<kKind, kHeadDim> stage(int tile) {
    unsigned char* const memory = PrefillShared::tile(kTiles);
    return {memory, memory + 2 * Row::kTileBytes + tile % kScaleStages * Row::kScaleBytes};
  }
  // Over all the rest, when it is no longer used.
  __device__ static Results results() {
    return {reinterpret_cast<float*>(queries()), reinterpret_cast<float*>(queries() + Results::kBytes)};
  }
  // What the queries were divided by, until the first tile of keys is widened.
  __device__ static float* query_factors() {
    return reinterpret_cast<float*>(tile(0));
  }

  // Widens the codes of K and V, eight at a time.
  __device__ static void widen_tile(const Stage<kKind, kHeadDim>& stage) {
    constexpr int kPieces = kTile * kChunks;
#pragma unroll 2
    for (unsigned i = opaque(threadIdx.x); i < kPieces; i += kAttentionThreads) {
      const int row = static_cast<int>(i / kChunks), chunk = static_cast<int>(i % kChunks);
      const int to = panel_offset<kChunks, kTile>(row, chunk);
      store_vector(reinterpret_cast<uint32_t*>(tile(0) + to),
                   widen_piece<KeyProduct<T, kKind>>(stage, false, row, chunk));
      store_vector(reinterpret_cast<uint32_t*>(tile(1) + to),
                   widen_piece<ValueProduct<T, kKind>>(stage, true, row, chunk));
    }
  }

 private:
  template <class Wide>
  __device__ static Vector<uint32_t, 4> widen_piece(const Stage<kKind, kHeadDim>& stage, bool values, int row,
                                                    int chunk) {
    constexpr int kBytes = Row::kInt4 ? 4 : 8;
    const unsigned char* const from = (values ? stage.values() : stage.keys()) +
                                      chunk_offset<Row::kChunks>(row, chunk * kBytes / 16) + chunk * kBytes % 16;
    Vector<uint32_t, 4> wide;
    if constexpr (Row::kInt4) {
      const uint32_t scale = values ? stage.value_scales()[row * Row::kValueScales + chunk * 8 / kInt4ValueGroup]
                                    : stage.key_scales()[row * Row::kKeyStride + chunk * 8 / kInt4KeyGroup];
      widen_int4(*reinterpret_cast<const uint32_t*>(from), scale, wide.values);
    } else {
      const auto packed = load_vector<2>(reinterpret_cast<const uint32_t*>(from));
      uint32_t pairs[2];
      for (int j = 0; j < 2; ++j) {
        widen<Wide, kKind, false>(packed.values[j], pairs);
        wide.values[2 * j] = pairs[0], wide.values[2 * j + 1] = pairs[1];
      }
    }
    return wide;
  }
};

}  // namespace fastinfer::cuda
