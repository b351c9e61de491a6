// Flash attention of one row tile over some of its KV tiles, by one block. The matrix products are mma.sync; S and P
// stay in registers. With up to 16 rows the warps share them and split each tile's positions, unless the plan is
// batch-invariant; else a warp has 16 rows of its own.
#pragma once

#include <cstring>
#include <type_traits>

#include "attention/paged_attention_tile_cuda.h"
#include "common/online_softmax.h"

namespace fastinfer::cuda {

// The exponential of attention's OnlineSoftmax.
struct Exp2 {
  __device__ float operator()(float x) const {
    return exp2_approx(x);
  }
};

template <class T>
__device__ uint32_t pack(float low, float high) {
  uint32_t bits;
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 pair = __floats2half2_rn(low, high);
    memcpy(&bits, &pair, sizeof bits);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    memcpy(&bits, &pair, sizeof bits);
  }
  return bits;
}

// Results relative to exp2(maximum): sums of values [rows, result_stride], and sums of exponentials.
struct Partial {
  const float* values;
  const float* maximum;
  const float* sum;
};

template <class T, int kHeadDim, bool kDecode>
class RowAttention {
  using Shared = Tiles<T, kHeadDim>;
  static constexpr int kTile = Shared::kTile;
  static constexpr int kPositions = kDecode ? 16 : kTile;  // positions of a tile that a warp multiplies
  static constexpr int kColumnWarps =
      kDecode ? kAttentionWarps * 16 / kTile : 1;  // warps with the same positions, which split V's columns
  static constexpr int kColumns = kHeadDim / kColumnWarps;
  static constexpr int kSteps = kHeadDim / 16;                     // steps of the product Q K^T
  static constexpr bool kKeepQueries = kDecode || kHeadDim < 128;  // in registers, 4 a step, where there is room
  static_assert(4 * kRowTile * (2 + result_stride(kHeadDim)) <= attention_shared_bytes(kHeadDim));

 public:
  // Partial results in shared memory: the number of parts into which a tile's positions are split.
  static constexpr int kPartials = kDecode ? kTile / 16 : 1;

  __device__ RowAttention(const PagedAttentionParams& p, const QueryRows& queries, const RowTile& rows)
      : p_(p), rows_(rows) {
    const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
    row0_ = kDecode ? 0 : warp * 16;
    position0_ = kDecode ? warp / kColumnWarps * 16 : 0;
    column0_ = kDecode ? warp % kColumnWarps * kColumns : 0;
    for (int i = 0; i < 2; ++i) {
      const int row = rows.row_begin + row0_ + lane() / 4 + 8 * i;
      position_[i] = queries.first_position + row / queries.group;
    }
  }

  // Over KV tiles `first` to `end` of the row tile's. Leaves its results in shared memory, for partial().
  __device__ void run(TileLoader<T, kHeadDim>& loader, int first, int end) {
    const bool quantized = p_.quantization != CacheQuantization::kNone;
    loader.start(0);
    loader.start(1);
    __syncthreads();  // Q is there
    if constexpr (kKeepQueries) {
      for (int k = 0; k < kSteps; ++k) load_queries(q_[k], k);
    }
    for (int tile = first; tile < end; ++tile) {
      const int stage = (tile - first) % 2;
      cp_async_wait<1>();
      __syncthreads();
      if (quantized) {
        Shared::widen(stage, p_.quantization);
        __syncthreads();
      }
      add_tile(tile, quantized ? 0 : stage, stage);
      __syncthreads();
      loader.start(stage);
    }
    cp_async_wait<0>();
    store();
    __syncthreads();
  }

  __device__ static Partial partial(int index) {
    return {results() + index * 16 * result_stride(kHeadDim), statistics() + index * 16,
            statistics() + kRowTile + index * 16};
  }

 private:
  __device__ static int lane() {
    return static_cast<int>(threadIdx.x) % kWarpSize;
  }

  // The rows' maxima and sums of exponentials; behind them their sums of values.
  __device__ static float* statistics() {
    return reinterpret_cast<float*>(Shared::queries());
  }
  __device__ static float* results() {
    return statistics() + 2 * kRowTile;
  }

  __device__ void load_queries(uint32_t (&a)[4], int k) const {
    ldmatrix(a, Shared::queries() + chunk_offset<Shared::kChunks>(row0_ + lane() % 16, 2 * k, lane() / 16));
  }

  __device__ void add_tile(int tile, int stage, int scales) {
    float s[kPositions / 8][4] = {};
    multiply_keys(Shared::stage(stage, false), s);
    float rescale[2];
    softmax(s, (rows_.first_kv_tile + tile) * kTile + position0_, scales, rescale);
    for (auto& o : o_) {
      o[0] *= rescale[0], o[1] *= rescale[0];
      o[2] *= rescale[1], o[3] *= rescale[1];
    }
    multiply_values(Shared::stage(stage, true), s);
  }

  // S = Q K^T
  __device__ void multiply_keys(const unsigned char* keys, float (&s)[kPositions / 8][4]) {
#pragma unroll(kKeepQueries ? kSteps : 4)
    for (int k = 0; k < kSteps; ++k) {
      if constexpr (!kKeepQueries) load_queries(q_[0], k);
      const auto& a = q_[kKeepQueries ? k : 0];
#pragma unroll
      for (int n = 0; n < kPositions / 16; ++n) {
        uint32_t b[4];
        const int row = position0_ + n * 16 + lane() / 16 * 8 + lane() % 8;
        ldmatrix(b, keys + chunk_offset<Shared::kChunks>(row, 2 * k, lane() / 8 % 2));
        mma<T>(s[2 * n], a, {b[0], b[1]});
        mma<T>(s[2 * n + 1], a, {b[2], b[3]});
      }
    }
  }

  // Turns S into P, relative to the rows' new maxima (times V's scales). `rescale` is the factor of a row's results so
  // far.
  __device__ void softmax(float (&s)[kPositions / 8][4], int first_position, int scales, float (&rescale)[2]) {
    const int last_position = first_position + kPositions - 1;
    const bool scaled = p_.quantization == CacheQuantization::kInt8 || p_.quantization == CacheQuantization::kFp8;
    const float* const k_scales = Shared::scales(scales, false) + position0_ + lane() % 4 * 2;
    const float* const v_scales = Shared::scales(scales, true) + position0_ + lane() % 4 * 2;
    const float factor = p_.softcap > 0.0f ? p_.scale / p_.softcap * 2 * kLog2e : p_.scale * kLog2e;
#pragma unroll
    for (int n = 0; n < kPositions / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (scaled) s[n][i] *= k_scales[n * 8 + i % 2];
        s[n][i] *= factor;
        // tanh(x) = 1 - 2 / (exp(2 x) + 1)
        if (p_.softcap > 0.0f) s[n][i] = p_.softcap * kLog2e * (1.0f - __fdividef(2.0f, exp2_approx(s[n][i]) + 1.0f));
      }
    }
    for (int i = 0; i < 2; ++i) {
      const int begin = p_.window > 0 ? position_[i] - p_.window + 1 : 0;
      if (last_position > position_[i] || first_position < begin) {
#pragma unroll
        for (int n = 0; n < kPositions / 8; ++n) {
          for (int c = 0; c < 2; ++c) {
            const int position = first_position + n * 8 + lane() % 4 * 2 + c;
            if (position > position_[i] || position < begin) s[n][2 * i + c] = kNegInf;
          }
        }
      }
      float maximum = softmax_[i].maximum;
#pragma unroll
      for (int n = 0; n < kPositions / 8; ++n) maximum = fmaxf(maximum, fmaxf(s[n][2 * i], s[n][2 * i + 1]));
      maximum = fmaxf(maximum, __shfl_xor_sync(kFullMask, maximum, 1));
      maximum = fmaxf(maximum, __shfl_xor_sync(kFullMask, maximum, 2));
      rescale[i] = softmax_[i].raise_maximum(maximum, Exp2{});
#pragma unroll
      for (int n = 0; n < kPositions / 8; ++n) {
        for (int c = 0; c < 2; ++c) {
          float& probability = s[n][2 * i + c];
          probability = exp2_approx(probability - maximum);
          softmax_[i].sum += probability;
          if (scaled) probability *= v_scales[n * 8 + c] * kValueFactor;
        }
      }
    }
  }

  // O += P V
  __device__ void multiply_values(const unsigned char* values, const float (&p)[kPositions / 8][4]) {
#pragma unroll
    for (int k = 0; k < kPositions / 16; ++k) {
      const uint32_t a[4] = {pack<T>(p[2 * k][0], p[2 * k][1]), pack<T>(p[2 * k][2], p[2 * k][3]),
                             pack<T>(p[2 * k + 1][0], p[2 * k + 1][1]), pack<T>(p[2 * k + 1][2], p[2 * k + 1][3])};
#pragma unroll
      for (int n = 0; n < kColumns / 16; ++n) {
        uint32_t b[4];
        const int row = position0_ + k * 16 + lane() % 16;
        ldmatrix_transposed(b, values + column0_ * 2 + chunk_offset<Shared::kChunks>(row, 2 * n, lane() / 16));
        mma<T>(o_[2 * n], a, {b[0], b[1]});
        mma<T>(o_[2 * n + 1], a, {b[2], b[3]});
      }
    }
  }

  // A row of partial i lies at 16 i + row.
  __device__ void store() {
    for (int i = 0; i < 2; ++i) {
      const int row = row0_ + position0_ + lane() / 4 + 8 * i;
      float* const to = results() + row * result_stride(kHeadDim) + split_place(kHeadDim, column0_ + lane() % 4 * 2);
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
        store_vector(to + split_place(kHeadDim, n * 8), Vector<float, 2>{o_[n][2 * i], o_[n][2 * i + 1]});
      }
      float sum = softmax_[i].sum;
      sum += __shfl_xor_sync(kFullMask, sum, 1);
      sum += __shfl_xor_sync(kFullMask, sum, 2);
      if (lane() % 4 == 0 && column0_ == 0) {
        statistics()[row] = softmax_[i].maximum;
        statistics()[kRowTile + row] = sum;
      }
    }
  }

  const PagedAttentionParams& p_;
  const RowTile& rows_;
  int row0_, position0_, column0_;  // of the warp
  int position_[2];                 // of the lane's two rows, 8 apart
  uint32_t q_[kKeepQueries ? kSteps : 1][4];
  float o_[kColumns / 8][4] = {};
  OnlineSoftmax<float> softmax_[2];  // the sums are those of this lane's positions
};

}  // namespace fastinfer::cuda
