// Flash attention of latents: 32 query rows, most of them the heads of one token, meet tiles of 16 cached rows, which
// are keys and values at once and arrive once. A warp computes the logits of half the rows and half the positions, all
// warps share them, and each has a quarter of the values' columns:
//
//   S = Q K^T                    [32, 16], a quarter a warp, through shared memory
//   P = softmax of S             all of it in every warp
//   O += P V                     [32, columns / 4] a warp, from the same tile
//
// A row's operations are the same wherever it lies in a row tile, and the plan's cuts are those of paged attention.
#include "attention/paged_attention_latent_cuda.h"

#include "attention/paged_attention_results_cuda.h"
#include "attention/paged_attention_softmax_cuda.h"
#include "attention/paged_attention_tile_cuda.h"
#include "common/cuda/launch.h"

namespace fastinfer::cuda {
namespace {

template <int kHeadDim>
struct LatentShared {
  using Results = SharedResults<kHeadDim, row_tile(kHeadDim)>;
  static constexpr int kQueryBytes = row_tile(kHeadDim) * kHeadDim * 2;
  static constexpr int kStageBytes = kv_tile(kHeadDim) * kHeadDim * 2;
  static_assert(Results::kBytes + Results::kStatisticsBytes <= kQueryBytes + kLatentStages * kStageBytes);

  __device__ static unsigned char* queries() {
    return dynamic_shared();
  }
  __device__ static unsigned char* stage(int index) {
    return queries() + kQueryBytes + index * kStageBytes;
  }
  // [rows][kLatentScoreStride]
  __device__ static float* scores() {
    return reinterpret_cast<float*>(stage(kLatentStages));
  }
  // Over queries and tiles, when they are no longer used.
  __device__ static Results results() {
    return {reinterpret_cast<float*>(queries()), reinterpret_cast<float*>(queries() + Results::kBytes)};
  }
};

template <class T, int kHeadDim>
class LatentAttention {
  using Shared = LatentShared<kHeadDim>;
  static constexpr int kRows = row_tile(kHeadDim), kTile = kv_tile(kHeadDim), kRowTiles = kRows / 16;
  static constexpr int kChunks = kHeadDim / 8;
  static constexpr int kSteps = kHeadDim / 16;  // of the product Q K^T
  static constexpr int kColumns = value_columns(kHeadDim) / kAttentionWarps;
  static constexpr int kGroupBytes = 8 * 16;  // eight chunks: four steps of a product
  static_assert(kRows == 32 && kTile == 16 && kAttentionWarps == 4 && kSteps % 4 == 0 && kColumns % 64 == 0);

 public:
  // Leaves its results in shared memory.
  __device__ static void run(const PagedAttentionParams& p, const WorkItem& item) {
    TileLoader<CacheQuantization::kNone, kHeadDim> loader(p);
    loader.begin(item);
    load_queries(p, item);
    const auto load = [&](int stage) {
      if (!loader.ended()) {
        loader.copy_floats(p.k_cache, Shared::stage(stage));
        loader.next();
      }
      cp_async_commit();
    };
    for (int stage = 0; stage < kLatentStages - 1; ++stage) load(stage);
    LatentAttention attention(p, item);
    for (int tile = 0, stage = 0; tile < item.tiles; ++tile, stage = (stage + 1) % kLatentStages) {
      cp_async_wait<kLatentStages - 2>();
      __syncthreads();  // the tile is there, and no warp reads the one before
      load((stage + kLatentStages - 1) % kLatentStages);
      attention.add(Shared::stage(stage), item.first_position(kHeadDim) + tile * kTile);
    }
    cp_async_wait<0>();
    __syncthreads();
    attention.store(Shared::results());
    __syncthreads();
  }

 private:
  __device__ LatentAttention(const PagedAttentionParams& p, const WorkItem& item) : softmax_(p, item, nullptr) {}

  // Addresses are made again for each tile: there are no registers to keep them.
  __device__ static int lane() {
    return static_cast<int>(opaque(threadIdx.x) % kWarpSize);
  }
  __device__ static int warp() {
    return static_cast<int>(opaque(threadIdx.x) / kWarpSize);
  }

  // Rows past the last one become zeros.
  __device__ static void load_queries(const PagedAttentionParams& p, const WorkItem& item) {
    const bool aligned = (reinterpret_cast<uintptr_t>(p.q) % 16 | (p.q_stride * sizeof(T)) % 16) == 0;
    for (int i = static_cast<int>(threadIdx.x); i < kRows * kChunks; i += kAttentionThreads) {
      const int own = i / kChunks, chunk = i % kChunks, row = item.rows.row_begin + own;
      Vector<T, 8> q{};
      if (row < item.rows.row_end) {
        const int group = item.queries.group;
        const int64_t token = item.queries.first_query + row / group;
        const T* from = static_cast<const T*>(p.q) + token * p.q_stride +
                        (int64_t{item.at.head} * group + row % group) * kHeadDim + chunk * 8;
        if (aligned) {
          q = load_vector<8>(from);
        } else {
          for (int j = 0; j < 8; ++j) q.values[j] = from[j];
        }
      }
      store_vector(reinterpret_cast<T*>(Shared::queries() + chunk_offset<kChunks>(own, chunk)), q);
    }
  }

  // Adds a tile whose first position is `first`.
  __device__ void add(const unsigned char* tile, int first) {
    if (!softmax_.sees(first, kTile)) return;  // the same in all warps
    multiply_keys(tile);
    __syncthreads();
    Logits<kRowTiles, kTile> s{};
    const int lane = this->lane();
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int n = 0; n < kTile / 8; ++n) {
          const float* const from =
              Shared::scores() + (16 * r + lane / 4 + 8 * i) * kLatentScoreStride + 8 * n + lane % 4 * 2;
          const auto pair = load_vector<2>(from);
          s.values[r][n][2 * i] = pair.values[0], s.values[r][n][2 * i + 1] = pair.values[1];
        }
      }
    }
    softmax_.update(s, first, [&](int r, int i, float factor) {
      for (auto& o : o_[r]) o[2 * i] *= factor, o[2 * i + 1] *= factor;
    });
    uint32_t a[kRowTiles][4];
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) s.template factors<T>(r, 0, a[r]);
    int at[4];  // of two chunks each, in a group of eight
#pragma unroll
    for (int n = 0; n < 4; ++n) at[n] = place(lane % 16, 2 * n + lane / 16) + warp() * (kColumns * 2);
#pragma unroll
    for (int n = 0; n < kColumns / 16; ++n) {
      uint32_t b[4];
      ldmatrix_transposed(b, tile + at[n % 4] + n / 4 * kGroupBytes);
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        mma<T>(o_[r][2 * n], a[r], {b[0], b[1]});
        mma<T>(o_[r][2 * n + 1], a[r], {b[2], b[3]});
      }
    }
  }

  // chunk_offset of a chunk in the first group of eight, whose places repeat in the others.
  __device__ static int place(int row, int chunk) {
    return row * (kChunks * 16) + (chunk ^ row % 8) * 16;
  }

  // The warp's quarter of S = Q K^T, in four sums, each of every fourth step, so that products do not wait for others.
  __device__ static void multiply_keys(const unsigned char* tile) {
    const int lane = LatentAttention::lane(), row0 = warp() / 2 * 16, position0 = warp() % 2 * 8;
    float s[4][4] = {};
    int query_at[4], key_at[2];
#pragma unroll
    for (int step = 0; step < 4; ++step) query_at[step] = place(row0 + lane % 16, 2 * step + lane / 16);
#pragma unroll
    for (int half = 0; half < 2; ++half) key_at[half] = place(position0 + lane % 8, 4 * half + lane / 8);
#pragma unroll
    for (int group = 0; group < kSteps / 4; ++group) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t b[4];
        ldmatrix(b, tile + key_at[half] + group * kGroupBytes);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          uint32_t a[4];
          ldmatrix(a, Shared::queries() + query_at[2 * half + i] + group * kGroupBytes);
          mma<T>(s[2 * half + i], a, {b[2 * i], b[2 * i + 1]});
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float* const to = Shared::scores() + (row0 + lane / 4 + 8 * i) * kLatentScoreStride + position0 + lane % 4 * 2;
      Vector<float, 2> pair;
      for (int c = 0; c < 2; ++c) {
        const int e = 2 * i + c;
        pair.values[c] = (s[0][e] + s[1][e]) + (s[2][e] + s[3][e]);
      }
      store_vector(to, pair);
    }
  }

  __device__ void store(const typename Shared::Results& results) const {
    const int lane = this->lane(), t = lane % 4;
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = 16 * r + lane / 4 + 8 * i;
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n) {
          const auto& o = o_[r][n];
          store_vector(results.at(row, warp() * kColumns + n * 8 + t / 2 * 4) + t % 2 * 2,
                       Vector<float, 2>{o[2 * i], o[2 * i + 1]});
        }
        const float sum = softmax_.sum(r, i);
        if (t == 0 && warp() == 0) results.maximum(row) = softmax_.maximum(r, i), results.sum(row) = sum;
      }
    }
  }

  float o_[kRowTiles][kColumns / 8][4] = {};
  RowSoftmax<kRowTiles, true, false> softmax_;
};

template <class T, int kHeadDim>
__global__ void __launch_bounds__(kAttentionThreads, 2)
    paged_latent_attention_kernel(const __grid_constant__ PagedAttentionParams p) {
  grid_dependency_wait();
  grid_dependency_launch();
  WorkCursor cursor = WorkCursor::first(p);
  while (!cursor.ended()) {
    const WorkItem item(p, cursor.at, cursor.units);
    LatentAttention<T, kHeadDim>::run(p, item);
    write_results<T, kHeadDim, true>(p, item, cursor.units, LatentShared<kHeadDim>::results(), 1);
    __syncthreads();  // shared memory is used again
    cursor.next(p, item.tiles);
  }
}

template <class T>
void launch_head_dim(const PagedAttentionParams& p, void* stream) {
  const auto run = [&]<int kHeadDim>() {
    launch("paged_latent_attention", paged_latent_attention_kernel<T, kHeadDim>, attention_launch(kHeadDim, p.blocks),
           stream, p);
  };
  p.head_dim == 320 ? run.template operator()<320>() : run.template operator()<576>();
}

}  // namespace

void paged_latent_attention(const PagedAttentionParams& p, void* stream) {
  p.dtype == DType::kFloat16 ? launch_head_dim<__half>(p, stream) : launch_head_dim<__nv_bfloat16>(p, stream);
}

}  // namespace fastinfer::cuda
