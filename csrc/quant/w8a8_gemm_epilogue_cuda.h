// The epilogue of the GPU's integer product: int32 sums of a unit in shared memory, [tokens, kW8a8SumsStride], to rows
// of the output. Of a split unit every block leaves its sums in the workspace, and the last to arrive adds them up.
#pragma once

#include "common/cuda/arrival.h"
#include "common/cuda/dtype.h"
#include "common/cuda/row.h"
#include "common/cuda/vector_io.h"
#include "elementwise/gated_inputs_cuda.h"
#include "quant/w8a8_gemm_unit_cuda.h"

namespace fastinfer::cuda {

template <int kTokens>
struct W8a8Epilogue {
  static constexpr int kWidth = 8;  // columns that a thread takes at a time

  const W8a8GemmParams& p;
  int32_t* const sums;
  const int64_t first_row, first_token;
  const int tokens;  // tokens of the tile that exist

  __device__ W8a8Epilogue(const W8a8GemmParams& params, const W8a8Unit& unit, int32_t* sums)
      : p(params),
        sums(sums),
        first_row(unit.first_row()),
        first_token(unit.first_token(params)),
        tokens(static_cast<int>(min(params.m - first_token, int64_t{kTokens}))) {}

  __device__ void store() {
    if (p.w8a8_plan.splits > 1 && !gather()) return;
    switch (p.dtype) {
      case DType::kBFloat16: return finish<__nv_bfloat16>();
      case DType::kFloat16: return finish<__half>();
      default: return finish<float>();
    }
  }

 private:
  // A thread moves sums in fours, which slots hold in the same order without the gap.
  static constexpr int kStep = kW8a8Threads * 4, kFours = kTokens * kW8a8Rows / kStep;

  __device__ int four(int i) const {
    return i * kStep + static_cast<int>(threadIdx.x) * 4;
  }
  __device__ bool exists(int i) const {
    return four(i) < tokens * kW8a8Rows;
  }
  __device__ int4& shared_four(int i) const {
    const int place = four(i) % kW8a8Rows, gap = place < kW8a8Rows / 2 ? 0 : split_half(kW8a8Rows) - kW8a8Rows / 2;
    return *reinterpret_cast<int4*>(sums + four(i) / kW8a8Rows * kW8a8SumsStride + place + gap);
  }

  // Returns true if this block is the unit's last. It then has the sums of all. It waits for 16 loads at a time, since
  // nobody else computes meanwhile.
  __device__ bool gather() {
    constexpr int kSlot = kTokens * kW8a8Rows, kBatch = kFours < 4 ? kFours : 4, kPieces = 16 / kBatch;
    const int splits = static_cast<int>(gridDim.y);
    int32_t* const slots = p.sums + static_cast<int64_t>(blockIdx.x) * splits * kSlot;
    int32_t* const own = slots + static_cast<int64_t>(blockIdx.y) * kSlot;
#pragma unroll 4
    for (int i = 0; i < kFours; ++i) {
      if (exists(i)) *reinterpret_cast<int4*>(own + four(i)) = shared_four(i);
    }
    if (!last_to_arrive(p.counters + blockIdx.x, splits)) return false;
#pragma unroll 1
    for (int first = 0; first < kFours; first += kBatch) {
      int4 sum[kBatch] = {};
#pragma unroll 1
      for (int split = 0; split < splits; split += kPieces) {
        int4 piece[kPieces][kBatch] = {};
#pragma unroll
        for (int s = 0; s < kPieces; ++s) {
#pragma unroll
          for (int i = 0; i < kBatch; ++i) {
            const int32_t* const from = slots + static_cast<int64_t>(split + s) * kSlot + four(first + i);
            if (split + s < splits && exists(first + i)) piece[s][i] = __ldcg(reinterpret_cast<const int4*>(from));
          }
        }
#pragma unroll
        for (int s = 0; s < kPieces; ++s) {
#pragma unroll
          for (int i = 0; i < kBatch; ++i) {
            sum[i].x += piece[s][i].x;
            sum[i].y += piece[s][i].y;
            sum[i].z += piece[s][i].z;
            sum[i].w += piece[s][i].w;
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (exists(first + i)) shared_four(first + i) = sum[i];
      }
    }
    __syncthreads();
    return true;
  }

  // Scales and biases of kWidth weight rows. Scales exist for whole row tiles.
  struct Rows {
    int row;
    float scale[kWidth], bias[kWidth] = {};
  };

  template <class T>
  __device__ Rows load_rows(int row, int count) const {
    Rows rows{.row = row};
    const int64_t first = first_row + row;
    if (p.weight.scale_dtype == DType::kFloat16) {
      load_floats(static_cast<const __half*>(p.weight.scales) + first, rows.scale);
    } else {
      load_floats(static_cast<const float*>(p.weight.scales) + first, rows.scale);
    }
    if (p.bias.data == nullptr) return rows;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      if (j >= count) break;
      rows.bias[j] = p.bias.dtype == DType::kFloat32 ? static_cast<const float*>(p.bias.data)[first + j]
                                                     : to_float(static_cast<const T*>(p.bias.data)[first + j]);
    }
    return rows;
  }

  // Loads a token's sums of these rows, scaled and with their bias.
  __device__ void load_values(int token, const Rows& rows, float x_scale, float (&values)[kWidth]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto four = load_vector<4>(sums + token * kW8a8SumsStride + split_four(kW8a8Rows, rows.row, half));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int i = 4 * half + j;
        values[i] = static_cast<float>(four.values[j]) * rows.scale[i] * x_scale;
        values[i] += rows.bias[i];
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

  // A thread has the same columns of several tokens.
  template <class T>
  __device__ void finish() const {
    const bool gated = p.activation != Activation::kNone;
    const int vectors = kW8a8Rows / kWidth / (gated ? 2 : 1);
    const int64_t width = gated ? p.n / 2 : p.n, first_column = first_row / (gated ? 2 : 1);
    const int column = static_cast<int>(threadIdx.x) % vectors * kWidth;
    const int count = static_cast<int>(min(width - first_column - column, int64_t{kWidth}));
    if (count <= 0) return;
    // With an activation rows come as 16 of the gate, 16 of up.
    const int row = gated ? column / kTileRows * 2 * kTileRows + column % kTileRows : column;
    const Rows rows = load_rows<T>(row, count), up_rows = gated ? load_rows<T>(row + kTileRows, count) : Rows{};
    for (int token = static_cast<int>(threadIdx.x) / vectors; token < tokens; token += kW8a8Threads / vectors) {
      const float x_scale = p.x_scales[first_token + token];
      const int64_t offset = (first_token + token) * width + first_column + column;
      const T* const residual = p.residual != nullptr ? static_cast<const T*>(p.residual) + offset : nullptr;
      float values[kWidth], up[kWidth];
      load_values(token, rows, x_scale, values);
      if (gated) load_values(token, up_rows, x_scale, up);
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
