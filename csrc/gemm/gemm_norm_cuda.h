// The RMSNorm in front of a matrix product with few tokens, on the way from x to the products.
#pragma once

#include <type_traits>

#include "common/cuda/dtype.h"
#include "common/cuda/vector_io.h"
#include "gemm/gemm_copy_cuda.h"

namespace fastinfer::cuda {

// The factor of the norm weights when x is multiplied by them: without it, fp16 would overflow at x * weight > 65504.
template <class T>
inline constexpr float kNormScale = std::is_same_v<T, __half> ? 0x1p-4f : 1.0f;

// Each thread multiplies the pieces of x that it copied by the norm weights, in place and rounded to 16 bits, before
// the barrier that shows them to the others. It adds up their squares; the epilogue divides by the root mean square.
// All tokens are in one tile.
template <class T, int kTokens, int kChunk, int kThreads>
class GemmNorm {
  using Pieces = GemmPieces<kTokens, kChunk, kThreads>;

 public:
  __device__ explicit GemmNorm(const Pieces& pieces) : pieces(pieces) {}

  // Fetches the norm weights of a chunk, well before they are needed.
  __device__ void load(const GemmParams& p, int chunk) {
    const int input = chunk * kChunk + pieces.input;
    const bool inside = input < static_cast<int>(p.k);
    rows = inside ? pieces.limit(static_cast<int>(p.m)) : 0;
    if (rows <= 0) return;
    if (p.norm_weight.dtype == DType::kFloat32) {
      const auto* from = static_cast<const float4*>(p.norm_weight.data) + input / 4;
      const float4 low = from[0], high = from[1];
      weights = {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
    } else {
      const auto loaded = load_vector<8>(static_cast<const T*>(p.norm_weight.data) + input);
#pragma unroll
      for (int i = 0; i < 8; ++i) weights.values[i] = to_float(loaded.values[i]);
    }
  }

  __device__ void apply(unsigned char* x) {
#pragma unroll
    for (int i = 0; i < Pieces::kRows; ++i) {
      if (i >= rows) break;
      T* const at = reinterpret_cast<T*>(pieces.place(x, i));
      auto vector = load_vector<8>(at);
#pragma unroll
      for (T& element : vector.values) {
        const float value = to_float(element);
        squares[i] += value * value;
        element = from_float<T>(value * (weights.values[&element - vector.values] * kNormScale<T>));
      }
      store_vector(at, vector);
    }
  }

  // Writes the tokens' sums of squares of a unit's chunks, and begins new ones.
  __device__ void share(float* shared_squares) {
#pragma unroll
    for (int i = 0; i < Pieces::kRows; ++i) {
      const int thread = opaque(threadIdx.x), token = thread / Pieces::kPieces + i * Pieces::kStep;
      float sum = squares[i];
      for (int offset = Pieces::kPieces / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(kFullMask, sum, offset);
      if (thread % Pieces::kPieces == 0 && token < kTokens) shared_squares[token] = sum;
      squares[i] = 0.0f;
    }
  }

 private:
  const Pieces& pieces;
  Vector<float, 8> weights{};
  int rows = 0;  // of this thread's pieces that there are
  float squares[Pieces::kRows] = {};
};

}  // namespace fastinfer::cuda
