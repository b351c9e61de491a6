// Kernels of one warp whose accesses cost what the manual says: what traffic.cpp must count.
#include <cstdlib>
#include <type_traits>

#include "common/cuda/launch.h"
#include "common/cuda/ptx.h"
#include "common/cuda/vector_io.h"

namespace fastinfer::cuda {
namespace {

struct Words {
  uint32_t values[3];
};

// Each lane reads kBytes, `stride` bytes after those of the lane before.
template <int kBytes>
__global__ void load(const unsigned char* global, int stride) {
  const unsigned char* const from = global != nullptr ? global : dynamic_shared();
  using Value = std::conditional_t<kBytes == 12, Words, Vector<unsigned char, kBytes == 12 ? 16 : kBytes>>;
  const Value value = *reinterpret_cast<const Value*>(from + static_cast<int>(threadIdx.x) * stride);
  static_cast<void>(value);
}

__global__ void store_twice(int stride) {
  for (int i = 0; i < 2; ++i) *reinterpret_cast<int*>(dynamic_shared() + static_cast<int>(threadIdx.x) * stride) = i;
}

// Ten lanes of each half warp access 16 bytes each.
__global__ void load_some(int stride) {
  const int lane = static_cast<int>(threadIdx.x);
  if (lane % 16 >= 10) return;
  const auto value = load_vector<16>(dynamic_shared() + lane * stride);
  static_cast<void>(value);
}

__global__ void add(int stride) {
  atomicAdd(reinterpret_cast<int*>(dynamic_shared() + static_cast<int>(threadIdx.x) * stride), 1);
}

__global__ void copy(const unsigned char* global, int stride) {
  cp_async(dynamic_shared() + static_cast<int>(threadIdx.x) * stride, global + static_cast<int>(threadIdx.x) * 16);
  cp_async_commit();
  cp_async_wait<0>();
}

__global__ void matrix(int stride) {
  uint32_t r[4];
  ldmatrix(r, dynamic_shared() + static_cast<int>(threadIdx.x) * stride);
}

void run(const auto& kernel, const auto&... arguments) {
  launch("pattern", kernel, {.grid = 1, .block = 32, .shared_bytes = 32 * 256}, nullptr, arguments...);
}

const unsigned char* global_memory() {
  static const auto* const memory = static_cast<const unsigned char*>(std::aligned_alloc(256, 32 * 256));
  return memory;
}

}  // namespace
}  // namespace fastinfer::cuda

#define FASTINFER_EXPORT extern "C" __attribute__((visibility("default")))

FASTINFER_EXPORT void load(int shared, int bytes, int stride) {
  using namespace fastinfer::cuda;
  const unsigned char* const global = shared != 0 ? nullptr : global_memory();
  switch (bytes) {
    case 2: return run(fastinfer::cuda::load<2>, global, stride);
    case 4: return run(fastinfer::cuda::load<4>, global, stride);
    case 8: return run(fastinfer::cuda::load<8>, global, stride);
    case 12: return run(fastinfer::cuda::load<12>, global, stride);
    case 32: return run(fastinfer::cuda::load<32>, global, stride);
    default: return run(fastinfer::cuda::load<16>, global, stride);
  }
}
FASTINFER_EXPORT void store_twice(int stride) {
  fastinfer::cuda::run(fastinfer::cuda::store_twice, stride);
}
FASTINFER_EXPORT void load_some(int stride) {
  fastinfer::cuda::run(fastinfer::cuda::load_some, stride);
}
FASTINFER_EXPORT void add(int stride) {
  fastinfer::cuda::run(fastinfer::cuda::add, stride);
}
FASTINFER_EXPORT void copy(int stride) {
  fastinfer::cuda::run(fastinfer::cuda::copy, fastinfer::cuda::global_memory(), stride);
}
FASTINFER_EXPORT void matrix(int stride) {
  fastinfer::cuda::run(fastinfer::cuda::matrix, stride);
}
