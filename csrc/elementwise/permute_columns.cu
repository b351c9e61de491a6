// A thread gathers 16 bytes of the result, or an element where the rows do not allow it.
#include "elementwise/permute_columns.h"

#include <algorithm>

#include "common/cuda/launch.h"
#include "common/cuda/ptx.h"
#include "common/cuda/vector_io.h"

namespace fastinfer::cuda {
namespace {

constexpr int64_t kMostThreads = 256;

template <class Element, int kCount>
__global__ void permute_columns_kernel(PermuteColumnsParams p) {
  grid_dependency_wait();
  grid_dependency_launch();
  const int64_t i = (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * kCount, token = blockIdx.x;
  if (i >= p.cols) return;
  const Element* x = static_cast<const Element*>(p.x) + token * p.x_stride;
  Vector<Element, kCount> out;
  constexpr int kPiece = kCount == 1 ? 1 : kVectorElements<int64_t>;
#pragma unroll
  for (int j = 0; j < kCount; j += kPiece) {
    const auto from = load_vector<kPiece>(p.permutation + i + j);
#pragma unroll
    for (int k = 0; k < kPiece; ++k) {
      const bool valid = from.values[k] >= 0 && from.values[k] < p.cols;
      out.values[j + k] = valid ? x[from.values[k]] : Element{};
    }
  }
  store_vector(static_cast<Element*>(p.out) + token * p.cols + i, out);
}

template <class Element, int kCount>
void launch_rows(const PermuteColumnsParams& p, void* stream) {
  const int64_t vectors = (p.cols + kCount - 1) / kCount;
  const int64_t threads = std::min((vectors + 31) / 32 * 32, kMostThreads);
  const LaunchConfig config{.grid = p.tokens,
                            .block = static_cast<unsigned>(threads),
                            .grid_y = static_cast<unsigned>((vectors + threads - 1) / threads),
                            .dependent = true};
  launch("permute_columns", permute_columns_kernel<Element, kCount>, config, stream, p);
}

template <class Element>
void launch_elements(const PermuteColumnsParams& p, void* stream) {
  constexpr int kVector = kVectorElements<Element>;
  const bool vectorised = p.cols % kVector == 0 && vector_aligned(p.permutation, p.out);
  vectorised ? launch_rows<Element, kVector>(p, stream) : launch_rows<Element, 1>(p, stream);
}

}  // namespace

void permute_columns(const PermuteColumnsParams& p, void* stream) {
  if (p.cols == 0) return;
  p.wide ? launch_elements<uint32_t>(p, stream) : launch_elements<uint16_t>(p, stream);
}

}  // namespace fastinfer::cuda
