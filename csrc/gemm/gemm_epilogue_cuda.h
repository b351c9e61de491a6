// The epilogue of the GPU's matrix products. The sums of a unit go through shared memory to rows of the output, where
// bias, activation and residual are applied. The sums of a cut unit go through the workspace, where the last worker to
// arrive adds up the pieces.
#pragma once

#include <bit>
#include <type_traits>

#include "common/cuda/arrival.h"
#include "common/cuda/dtype.h"
#include "common/cuda/ptx.h"
#include "common/cuda/reduce.h"
#include "common/cuda/vector_io.h"
#include "elementwise/gated_inputs_cuda.h"
#include "gemm/gemm.h"
#include "gemm/gemm_plan.h"
#include "gemm/gemm_position_cuda.h"

namespace fastinfer::cuda {

template <class T>
__device__ float vector_arg(const VectorArg& arg, int64_t i) {
  return arg.dtype == DType::kFloat32 ? static_cast<const float*>(arg.data)[i]
                                      : to_float(static_cast<const T*>(arg.data)[i]);
}

__device__ inline float activate(Activation activation, float x, float gain) {
  switch (activation) {
    case Activation::kSilu:
    case Activation::kClampedSwiglu: return x / (1.0f + __expf(-gain * x));
    case Activation::kGeluTanh: return 0.5f * x * (1.0f + tanhf(0.7978845608f * (x + 0.044715f * x * x * x)));
    default: return 0.5f * x * (1.0f + erff(0.7071067812f * x));
  }
}

__device__ inline float activate_and_mul(Activation activation, float gate, float up) {
  const GatedInputs inputs(activation, gate, up);
  return activate(activation, inputs.gate, inputs.gain) * inputs.up;
}

// kSliceTiles: eights of every warp's tokens that go through shared memory at a time.
template <class T, int kTokens, int kWarpsRows, int kWarpsTokens, int kWarpsInputs, bool kGrouped, int kSliceTiles = 1>
struct GemmEpilogue {
  static constexpr int kThreads = kWarpsRows * kWarpsTokens * kWarpsInputs * kWarpSize;
  static constexpr int kRowTiles = kGemmRows / kTileRows / kWarpsRows, kTokenTiles = kTokens / 8 / kWarpsTokens;
  static constexpr int kWidth = 8;  // sums that a thread takes at a time
  static constexpr int kWarpTokens = 8 * kSliceTiles, kSliceTokens = kWarpTokens * kWarpsTokens;  // of a slice
  static constexpr int kSumsFloats = kWarpsInputs * kSliceTokens * kSumsStride;
  static constexpr int kSharedBytes = kSumsFloats * 4;
  static constexpr int kFours = kRowTiles * kTokenTiles;  // of a thread's sums

  // The sums of a lane: mma's d for each row tile and eight tokens.
  struct Sums {
    float value[kRowTiles][kTokenTiles][4] = {};
  };

  const GemmParams& p;
  const GemmPosition<kGrouped> at;
  float* const shared_sums;  // [warps_inputs, slice_tokens, kSumsStride]
  const int thread, lane, warp_rows, warp_tokens, warp_inputs;
  int first_chunk = 0;  // the unit's first, in the line of those that are cut
  int first_worker = 0, pieces = 1;

  __device__ GemmEpilogue(const GemmParams& params, const TokenTiles<kGrouped>& tiles, int unit, float* shared)
      : p(params),
        at(params, tiles, unit),
        shared_sums(shared),
        thread(opaque(threadIdx.x)),
        lane(thread % kWarpSize),
        warp_rows(thread / kWarpSize % kWarpsRows),
        warp_tokens(thread / kWarpSize / kWarpsRows / kWarpsInputs),
        warp_inputs(thread / kWarpSize / kWarpsRows % kWarpsInputs) {
    if (kGrouped || unit < p.plan.whole_units) return;
    first_chunk = (unit - p.plan.whole_units) * p.plan.chunks;
    first_worker = first_chunk / p.plan.worker_chunks;
    pieces = (first_chunk + p.plan.chunks - 1) / p.plan.worker_chunks - first_worker + 1;
  }

  // Writes the unit's outputs if the block has all its sums, or is the last of those that have a part of them.
  __device__ void store(Sums& sums) {
    if (!kGrouped && pieces > 1) {
      keep_piece(sums);
      if (!last_to_arrive(p.counters + at.unit, pieces)) return;
      add_pieces(sums);
    }
    const int tokens = static_cast<int>(end_token() - first_token());
    const int bits = gated() ? kVectorBits - 1 : kVectorBits;  // of a token's vectors of outputs
#pragma unroll 1
    for (int slice = 0; slice < kTokenTiles / kSliceTiles; ++slice) {
      share_sums(sums, slice);
      __syncthreads();
      for (int i = thread; i < kSliceTokens << bits; i += kThreads) {
        const int slice_token = i >> bits, vector = i - (slice_token << bits);
        const int token = slice_token / kWarpTokens * kTokenTiles * 8 + slice * kWarpTokens + slice_token % kWarpTokens;
        if (token < tokens) finish(slice_token, token, vector);
      }
      __syncthreads();
    }
  }

 private:
  static constexpr int kVectorBits = std::bit_width(unsigned{kGemmRows / kWidth}) - 1;

  struct Vector8 {
    float values[kWidth] = {};
  };

  __device__ int64_t first_row() const {
    return static_cast<int64_t>(at.row_unit) * kGemmRows;
  }
  __device__ int64_t first_token() const {
    return at.first_token(p);
  }
  __device__ int64_t end_token() const {
    return at.end_token(p);
  }
  __device__ int64_t out_row(int token) const {
    return kGrouped ? p.expert_rows.out_row(first_token() + token) : first_token() + token;
  }
  __device__ bool gated() const {
    return p.activation != Activation::kNone;
  }

  __device__ void share_sums(const Sums& sums, int slice) const {
    const int lane = opaque(threadIdx.x) % kWarpSize;  // computed before, the place spills for sm_90a
    float* to = shared_sums + (warp_inputs * kSliceTokens + warp_tokens * kWarpTokens + lane % 4 * 2) * kSumsStride +
                warp_rows * (kRowTiles * kTileRows / 2) + split_place(kGemmRows, lane / 4);
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {  // registers have no index: a branch for each
      if (n / kSliceTiles != slice) continue;
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          to[(n % kSliceTiles * 8 + i % 2) * kSumsStride + split_place(kGemmRows, r * kTileRows + i / 2 * 8)] =
              sums.value[r][n][i];
        }
      }
    }
  }

  // A worker has two slots in the workspace, each of the sums of all threads. The second is for a unit that it begins.
  __device__ float4* slot(int worker) const {
    const int begins = worker * p.plan.worker_chunks <= first_chunk ? 1 : 0;
    float* const slots = static_cast<float*>(p.workspace);
    return reinterpret_cast<float4*>(slots + static_cast<int64_t>(2 * worker + begins) * p.plan.slot_floats) + thread;
  }

  __device__ void keep_piece(const Sums& sums) const {
    float4* const to = slot(blockIdx.x);
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      const auto& four = sums.value[i / kTokenTiles][i % kTokenTiles];
      to[i * kThreads] = make_float4(four[0], four[1], four[2], four[3]);
    }
  }

  // Adds up the pieces of a cut unit, this worker's too, in the order of the workers.
  __device__ void add_pieces(Sums& sums) const {
    sums = {};
#pragma unroll(kFours < 4 ? 4 : 1)  // loads at once
    for (int piece = 0; piece < pieces; ++piece) {
      const float4* const from = slot(first_worker + piece);
#pragma unroll
      for (int i = 0; i < kFours; ++i) {
        const float4 part = __ldcg(from + i * kThreads);
        auto& four = sums.value[i / kTokenTiles][i % kTokenTiles];
        four[0] += part.x, four[1] += part.y, four[2] += part.z, four[3] += part.w;
      }
    }
  }

  // The sums of eight rows of the unit from `row` on.
  __device__ Vector8 load_shared(int slice_token, int row) const {
    Vector8 v;
#pragma unroll
    for (int w = 0; w < kWarpsInputs; ++w) {
      const float* const from = shared_sums + (w * kSliceTokens + slice_token) * kSumsStride;
#pragma unroll
      for (int i = 0; i < kWidth; i += 4) {
        const float4 four = *reinterpret_cast<const float4*>(from + split_four(kGemmRows, row, i / 4));
        v.values[i] += four.x, v.values[i + 1] += four.y, v.values[i + 2] += four.z, v.values[i + 3] += four.w;
      }
    }
    return v;
  }

  // The same with their bias.
  __device__ Vector8 biased(int slice_token, int row) const {
    Vector8 v = load_shared(slice_token, row);
    if (p.bias.data == nullptr) return v;
    const int64_t first = first_row() + row, bias = kGrouped ? at.expert_tile.expert * p.n + first : first;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      if (first + i < p.n) v.values[i] += vector_arg<T>(p.bias, bias + i);
    }
    return v;
  }

  __device__ void finish(int slice_token, int token, int vector) const {
    // With an activation, 16 rows of the gate alternate with 16 rows of up.
    const int row = gated() ? vector / 2 * 2 * kTileRows + vector % 2 * kWidth : vector * kWidth;
    Vector8 v = biased(slice_token, row);
    if (gated()) {
      const Vector8 up = biased(slice_token, row + kTileRows);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) v.values[i] = activate_and_mul(p.activation, v.values[i], up.values[i]);
    }
    const int64_t width = gated() ? p.n / 2 : p.n;
    const int64_t column = (gated() ? first_row() / 2 : first_row()) + vector * kWidth;
    if (column >= width) return;
    const int64_t offset = out_row(token) * width + column;
    const T* residual = p.residual != nullptr ? static_cast<const T*>(p.residual) + offset : nullptr;
    T* out = static_cast<T*>(p.out) + offset;
    const auto aligned = [](const T* at) { return reinterpret_cast<uintptr_t>(at) % 16 == 0; };
    if (column + kWidth <= width && aligned(out) && aligned(residual)) {
      Vector<T, kWidth> r{}, result;
      if (residual != nullptr) r = load_vector<kWidth>(residual);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) result.values[i] = from_float<T>(v.values[i] + to_float(r.values[i]));
      store_vector(out, result);
    } else {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        if (column + i >= width) break;
        out[i] = from_float<T>(v.values[i] + (residual != nullptr ? to_float(residual[i]) : 0.0f));
      }
    }
  }
};

}  // namespace fastinfer::cuda
