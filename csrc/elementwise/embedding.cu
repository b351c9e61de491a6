// Gather on the GPU: a thread moves 16 bytes of the narrower type, or an element where a row does not allow it. All
// 16-bit floats pass through fp32 unchanged.
#include "elementwise/embedding.h"

#include <algorithm>

#include "common/cuda/launch.h"
#include "common/cuda/ptx.h"
#include "common/cuda/row.h"

namespace fastinfer::cuda {
namespace {

constexpr int64_t kMostThreads = 256;

template <class W, class T, int kCount>
__global__ void embedding_kernel(EmbeddingParams p) {
  grid_dependency_wait();
  grid_dependency_launch();
  const int64_t i = (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * kCount, token = blockIdx.x;
  if (i >= p.hidden) return;
  const int64_t id = p.ids[token], offset = token * p.hidden + i;
  float values[kCount] = {};  // for an id out of range: the host cannot check without waiting for the device
  if (id >= 0 && id < p.vocab) load_floats(static_cast<const W*>(p.weight) + id * p.hidden + i, values);
  if (p.residual != nullptr) {
    float residual[kCount];
    load_floats(static_cast<const T*>(p.residual) + offset, residual);
#pragma unroll
    for (int j = 0; j < kCount; ++j) values[j] += residual[j];
  }
  store_values(static_cast<T*>(p.out) + offset, values);
}

template <class W, class T, int kCount>
void launch_rows(const EmbeddingParams& p, void* stream) {
  const int64_t vectors = (p.hidden + kCount - 1) / kCount;
  const int64_t threads = std::min((vectors + 31) / 32 * 32, kMostThreads);
  const LaunchConfig config{.grid = p.tokens,
                            .block = static_cast<unsigned>(threads),
                            .grid_y = static_cast<unsigned>((vectors + threads - 1) / threads),
                            .dependent = true};
  launch("embedding", embedding_kernel<W, T, kCount>, config, stream, p);
}

}  // namespace

void embedding(const EmbeddingParams& p, void* stream) {
  if (p.hidden == 0) return;
  dispatch_cuda(p.weight_dtype, [&]<class W>(W) {
    dispatch_cuda(p.dtype, [&]<class T>(T) {
      constexpr int kVector = std::max(kVectorElements<W>, kVectorElements<T>);
      const bool vectorised = p.hidden % kVector == 0 && vector_aligned(p.weight, p.residual, p.out);
      vectorised ? launch_rows<W, T, kVector>(p, stream) : launch_rows<W, T, 1>(p, stream);
    });
  });
}

}  // namespace fastinfer::cuda
