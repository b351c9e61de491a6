// Rotary embedding on the GPU: a block per token.
#include <algorithm>

#include "common/cuda/dtype.h"
#include "common/cuda/launch.h"
#include "common/cuda/ptx.h"
#include "common/cuda/reduce.h"
#include "common/cuda/row.h"
#include "common/cuda/vector_io.h"
#include "rotary/rotary_embedding.h"

namespace fastinfer::cuda {
namespace {

// A thread takes kCount pairs of a head: 16 bytes at a time of either half, or of neighbouring elements.
template <class T, int kCount>
__global__ void rotary_embedding_kernel(RotaryEmbeddingParams p) {
  grid_dependency_wait();
  grid_dependency_launch();
  const int64_t token = blockIdx.x, position = p.positions[token];
  if (position < 0 || position >= p.max_position) return;  // the host cannot check without waiting for the device
  const int half = p.rotary_dim / 2, steps = half / kCount;
  const float* table = p.cos_sin_cache + position * p.rotary_dim;
  for (int i = threadIdx.x; i < (p.q_heads + p.kv_heads) * steps; i += blockDim.x) {
    const int head = i / steps, pair = i % steps * kCount;
    T* row = head < p.q_heads ? static_cast<T*>(p.q) + token * p.q_stride + head * p.head_dim
                              : static_cast<T*>(p.k) + token * p.k_stride + (head - p.q_heads) * p.head_dim;
    T* const first = row + (p.interleaved ? 2 * pair : pair);
    T* const second = first + (p.interleaved ? kCount : half);
    Vector<T, kCount> elements[2] = {load_vector<kCount>(first), load_vector<kCount>(second)};
    float cos[kCount], sin[kCount];
    load_floats(table + pair, cos), load_floats(table + half + pair, sin);
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      T& x = p.interleaved ? elements[2 * j / kCount].values[2 * j % kCount] : elements[0].values[j];
      T& y = p.interleaved ? elements[(2 * j + 1) / kCount].values[(2 * j + 1) % kCount] : elements[1].values[j];
      const float rotated = to_float(x) * cos[j] - to_float(y) * sin[j];
      y = from_float<T>(to_float(y) * cos[j] + to_float(x) * sin[j]);
      x = from_float<T>(rotated);
    }
    store_vector(first, elements[0]);
    store_vector(second, elements[1]);
  }
}

}  // namespace

void rotary_embedding(const RotaryEmbeddingParams& p, void* stream) {
  const int pairs = (p.q_heads + p.kv_heads) * p.rotary_dim / 2;
  if (pairs == 0) return;
  dispatch_cuda(p.dtype, [&]<class T>(T) {
    constexpr int kCount = kVectorElements<T>;
    const auto run = [&]<int kPairs>() {
      const int threads = std::min((pairs / kPairs + kWarpSize - 1) / kWarpSize * kWarpSize, 512);
      launch("rotary_embedding", rotary_embedding_kernel<T, kPairs>,
             {.grid = p.tokens, .block = static_cast<unsigned>(threads), .dependent = true}, stream, p);
    };
    const int64_t distances = p.rotary_dim / 2 | p.head_dim | p.q_stride | p.k_stride;
    distances % kCount == 0 && vector_aligned(p.q, p.k, p.cos_sin_cache) ? run.template operator()<kCount>()
                                                                         : run.template operator()<1>();
  });
}

}  // namespace fastinfer::cuda
