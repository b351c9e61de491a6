// Gather on the GPU: a thread moves 16 bytes, or 2 where a row is not a multiple of 16 bytes.
#include "fused/embedding.h"

#include <algorithm>

#include "common/cuda/launch.h"
#include "common/cuda/ptx.h"
#include "common/cuda/vector_io.h"

namespace fastinfer::cuda {
namespace {

constexpr int64_t kMostThreads = 256;

template <class Piece>
__global__ void embedding_kernel(EmbeddingParams p) {
  grid_dependency_wait();
  grid_dependency_launch();
  const int64_t pieces = p.row_bytes / static_cast<int64_t>(sizeof(Piece)), token = blockIdx.x;
  const int64_t i = static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x;
  if (i >= pieces) return;
  const int64_t id = p.ids[token];
  const bool valid = id >= 0 && id < p.vocab;  // the host cannot check without waiting for the device
  static_cast<Piece*>(p.out)[token * pieces + i] =
      valid ? static_cast<const Piece*>(p.weight)[id * pieces + i] : Piece{};
}

template <class Piece>
void launch_rows(const EmbeddingParams& p, void* stream) {
  const int64_t pieces = p.row_bytes / static_cast<int64_t>(sizeof(Piece));
  const int64_t threads = std::min((pieces + 31) / 32 * 32, kMostThreads);
  const LaunchConfig config{.grid = p.tokens,
                            .block = static_cast<unsigned>(threads),
                            .grid_y = static_cast<unsigned>((pieces + threads - 1) / threads),
                            .dependent = true};
  launch("embedding", embedding_kernel<Piece>, config, stream, p);
}

}  // namespace

void embedding(const EmbeddingParams& p, void* stream) {
  if (p.row_bytes == 0) return;
  const bool vectorised = p.row_bytes % 16 == 0 && vector_aligned(p.weight, p.out);
  vectorised ? launch_rows<uint4>(p, stream) : launch_rows<uint16_t>(p, stream);
}

}  // namespace fastinfer::cuda
