// Rotary embedding on the GPU: a block per token, a thread per pair of elements.
#include <algorithm>

#include "common/cuda/dtype.h"
#include "common/cuda/launch.h"
#include "common/cuda/ptx.h"
#include "common/cuda/reduce.h"
#include "rotary/rotary_embedding.h"

namespace fastinfer::cuda {
namespace {

template <class T>
__global__ void rotary_embedding_kernel(RotaryEmbeddingParams p) {
  grid_dependency_wait();
  grid_dependency_launch();
  const int64_t token = blockIdx.x, position = p.positions[token];
  if (position < 0 || position >= p.max_position) return;  // the host cannot check without waiting for the device
  const int half = p.rotary_dim / 2;
  const float* cos = p.cos_sin_cache + position * p.rotary_dim;
  const float* sin = cos + half;
  for (int i = threadIdx.x; i < (p.q_heads + p.kv_heads) * half; i += blockDim.x) {
    const int head = i / half, pair = i % half;
    T* row = head < p.q_heads ? static_cast<T*>(p.q) + token * p.q_stride + head * p.head_dim
                              : static_cast<T*>(p.k) + token * p.k_stride + (head - p.q_heads) * p.head_dim;
    T& first = row[p.interleaved ? 2 * pair : pair];
    T& second = row[p.interleaved ? 2 * pair + 1 : pair + half];
    const float x = to_float(first), y = to_float(second);
    first = from_float<T>(x * cos[pair] - y * sin[pair]);
    second = from_float<T>(y * cos[pair] + x * sin[pair]);
  }
}

}  // namespace

void rotary_embedding(const RotaryEmbeddingParams& p, void* stream) {
  const int pairs = (p.q_heads + p.kv_heads) * p.rotary_dim / 2;
  if (pairs == 0) return;
  const auto threads = static_cast<unsigned>(std::min((pairs + kWarpSize - 1) / kWarpSize * kWarpSize, 512));
  dispatch_cuda(p.dtype, [&]<class T>(T) {
    launch("rotary_embedding", rotary_embedding_kernel<T>, {.grid = p.tokens, .block = threads, .dependent = true},
           stream, p);
  });
}

}  // namespace fastinfer::cuda
