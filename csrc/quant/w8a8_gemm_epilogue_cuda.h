// The epilogue of the GPU's integer product: int32 sums of a unit in shared memory, [tokens, kW8a8SumsStride], to rows
// of the output. Of a split unit every block leaves its sums in the workspace, and the last to arrive adds them up.
#pragma once

#include "common/cuda/arrival.h"
#include "common/cuda/dtype.h"
#include "common/cuda/row.h"
#include "common/cuda/vector_io.h"
#include "elementwise/gated_inputs_cuda.h"
#include "quant/w8a8_gemm.h"

namespace fastinfer::cuda {

struct W8a8Epilogue {
  static constexpr int kWidth = 8;  // columns that a thread takes at a time

  const W8a8GemmParams& p;
  int32_t* const sums;
  const int64_t first_row, first_token;
  const int tokens;  // tokens of the tile that exist

  __device__ W8a8Epilogue(const W8a8GemmParams& params, int32_t* sums)
      : p(params),
        sums(sums),
        first_row(static_cast<int64_t>(blockIdx.x / params.w8a8_plan.token_tiles) * kW8a8Rows),
        first_token(static_cast<int64_t>(blockIdx.x % params.w8a8_plan.token_tiles) * params.w8a8_plan.tile.tokens),
        tokens(static_cast<int>(min(params.m - first_token, static_cast<int64_t>(params.w8a8_plan.tile.tokens)))) {}

  __device__ void store() {
    if (p.w8a8_plan.splits > 1 && !gather()) return;
    switch (p.dtype) {
      case DType::kBFloat16: return finish<__nv_bfloat16>();
      case DType::kFloat16: return finish<__half>();
      default: return finish<float>();
    }
  }

 private:
  // Calls fn(place in shared memory, place in a slot) for this thread's runs of four sums, which slots hold in the same
  // order without the gap.
  template <class Fn>
  __device__ void each_four(Fn&& fn) {
    for (int i = threadIdx.x * 4; i < tokens * kW8a8Rows; i += kW8a8Threads * 4) {
      const int place = i % kW8a8Rows, gap = place < kW8a8Rows / 2 ? 0 : split_half(kW8a8Rows) - kW8a8Rows / 2;
      fn(reinterpret_cast<int4*>(sums + i / kW8a8Rows * kW8a8SumsStride + place + gap), i);
    }
  }

  // Returns true if this block is the unit's last. It then has the sums of all.
  __device__ bool gather() {
    const int splits = static_cast<int>(gridDim.y), slot_ints = p.w8a8_plan.tile.tokens * kW8a8Rows;
    int32_t* const slots = p.sums + static_cast<int64_t>(blockIdx.x) * splits * slot_ints;
    int32_t* const own = slots + static_cast<int64_t>(blockIdx.y) * slot_ints;
    each_four([&](int4* shared, int i) { *reinterpret_cast<int4*>(own + i) = *shared; });
    if (!last_to_arrive(p.counters + blockIdx.x, splits)) return false;
    each_four([&](int4* shared, int i) {
      int4 sum{};
#pragma unroll 4  // loads at once
      for (int s = 0; s < splits; ++s) {
        const int4 part = __ldcg(reinterpret_cast<const int4*>(slots + static_cast<int64_t>(s) * slot_ints + i));
        sum.x += part.x;
        sum.y += part.y;
        sum.z += part.z;
        sum.w += part.w;
      }
      *shared = sum;
    });
    __syncthreads();
    return true;
  }

  template <class T>
  __device__ float bias(int64_t row) const {
    if (p.bias.data == nullptr) return 0.0f;
    return p.bias.dtype == DType::kFloat32 ? static_cast<const float*>(p.bias.data)[row]
                                           : to_float(static_cast<const T*>(p.bias.data)[row]);
  }

  // Loads sums of the weight rows from `row` on, scaled and with their bias. Scales exist for whole row tiles.
  template <class T>
  __device__ void load_values(int token, int row, float x_scale, int count, float (&values)[kWidth]) const {
    if (p.weight.scale_dtype == DType::kFloat16) {
      load_floats(static_cast<const __half*>(p.weight.scales) + first_row + row, values);
    } else {
      load_floats(static_cast<const float*>(p.weight.scales) + first_row + row, values);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto four = load_vector<4>(sums + token * kW8a8SumsStride + split_four(kW8a8Rows, row, half));
#pragma unroll
      for (int j = 4 * half; j < 4 * half + 4; ++j) {
        values[j] = static_cast<float>(four.values[j % 4]) * values[j] * x_scale;
        if (j < count) values[j] += bias<T>(first_row + row + j);
      }
    }
  }

  __device__ static float activate(Activation activation, float x, float gain) {
    switch (activation) {
      case Activation::kSilu:
      case Activation::kClampedSwiglu: return x / (1.0f + __expf(-gain * x));
      case Activation::kGeluTanh: return x / (1.0f + __expf(-x * (1.5957691216f + 0.0713548162f * x * x)));
      default: return 0.5f * x * (1.0f + erff(x * 0.70710678f));
    }
  }

  __device__ static float activate_and_mul(Activation activation, float gate, float up) {
    const GatedInputs inputs(activation, gate, up);
    return activate(activation, inputs.gate, inputs.gain) * inputs.up;
  }

  template <class T>
  __device__ void finish() const {
    const bool gated = p.activation != Activation::kNone;
    const int vectors = kW8a8Rows / kWidth / (gated ? 2 : 1);
    const int64_t width = gated ? p.n / 2 : p.n, first_column = first_row / (gated ? 2 : 1);
    for (int i = threadIdx.x; i < tokens * vectors; i += kW8a8Threads) {
      const int token = i / vectors, column = i % vectors * kWidth;
      const int count = static_cast<int>(min(width - first_column - column, int64_t{kWidth}));
      if (count <= 0) continue;
      // With an activation rows come as 16 of the gate, 16 of up.
      const int row = gated ? column / kTileRows * 2 * kTileRows + column % kTileRows : column;
      const float x_scale = p.x_scales[first_token + token];
      const int64_t offset = (first_token + token) * width + first_column + column;
      const T* const residual = p.residual != nullptr ? static_cast<const T*>(p.residual) + offset : nullptr;
      float values[kWidth], up[kWidth];
      load_values<T>(token, row, x_scale, count, values);
      if (gated) load_values<T>(token, row + kTileRows, x_scale, count, up);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        if (j >= count) break;
        if (gated) values[j] = activate_and_mul(p.activation, values[j], up[j]);
        if (residual != nullptr) values[j] += to_float(residual[j]);
      }
      T* const out = static_cast<T*>(p.out) + offset;
      constexpr int kPiece = kVectorElements<T>;
      if (count == kWidth && reinterpret_cast<uintptr_t>(out) % 16 == 0) {
#pragma unroll
        for (int j = 0; j < kWidth; j += kPiece) {
          Vector<T, kPiece> piece;
          for (int e = 0; e < kPiece; ++e) piece.values[e] = from_float<T>(values[j + e]);
          store_vector(out + j, piece);
        }
      } else {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          if (j < count) out[j] = from_float<T>(values[j]);
        }
      }
    }
  }
};

}  // namespace fastinfer::cuda
