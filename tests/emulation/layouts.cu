// One kernel per instruction of common/cuda/ptx.h, for tests/emulation/test_emulation.py: each lane gives its registers
// and keeps what it receives. nvcc compiles it too, so that a GPU is held to the same statement of the layouts. Angle
// brackets, so that nvcc looks past this folder.
#include <common/cuda/launch.h>
#include <common/cuda/ptx.h>
#include <common/cuda/wgmma.h>

#include <cstdint>
#include <string_view>
#include <type_traits>

namespace fastinfer::cuda {
namespace {

// in [32, a 4, b 2, d 4], out [32, 4]
template <class T>
__global__ void mma_kernel(const uint32_t* in, uint32_t* out) {
  const uint32_t* mine = in + threadIdx.x * 10;
  const uint32_t a[4] = {mine[0], mine[1], mine[2], mine[3]}, b[2] = {mine[4], mine[5]};
  float d[4];
  for (int i = 0; i < 4; ++i) d[i] = __uint_as_float(mine[6 + i]);
  mma<T>(d, a, b);
  for (int i = 0; i < 4; ++i) out[threadIdx.x * 4 + i] = __float_as_uint(d[i]);
}

__global__ void mma_tf32_kernel(const uint32_t* in, uint32_t* out) {
  const uint32_t* mine = in + threadIdx.x * 10;
  const uint32_t a[4] = {mine[0], mine[1], mine[2], mine[3]}, b[2] = {mine[4], mine[5]};
  float d[4];
  for (int i = 0; i < 4; ++i) d[i] = __uint_as_float(mine[6 + i]);
  mma_tf32(d, a, b);
  for (int i = 0; i < 4; ++i) out[threadIdx.x * 4 + i] = __float_as_uint(d[i]);
}

__global__ void mma_int8_kernel(const uint32_t* in, uint32_t* out) {
  const uint32_t* mine = in + threadIdx.x * 10;
  const uint32_t a[4] = {mine[0], mine[1], mine[2], mine[3]}, b[2] = {mine[4], mine[5]};
  int32_t d[4];
  for (int i = 0; i < 4; ++i) d[i] = static_cast<int32_t>(mine[6 + i]);
  mma_int8(d, a, b);
  for (int i = 0; i < 4; ++i) out[threadIdx.x * 4 + i] = static_cast<uint32_t>(d[i]);
}

// in [matrices 4, rows 8, 4 words], out [32, kMatrices]
template <int kMatrices, bool kTransposed>
__global__ void ldmatrix_kernel(const uint32_t* in, uint32_t* out) {
  uint32_t* rows = reinterpret_cast<uint32_t*>(dynamic_shared());
  for (int i = 0; i < 4; ++i) rows[threadIdx.x * 4 + i] = in[threadIdx.x * 4 + i];
  __syncthreads();
  uint32_t r[kMatrices];
  if constexpr (kTransposed) {
    ldmatrix_transposed(r, rows + threadIdx.x * 4);
  } else {
    ldmatrix(r, rows + threadIdx.x * 4);
  }
  for (int i = 0; i < kMatrices; ++i) out[threadIdx.x * kMatrices + i] = r[i];
}

// in [32, 3], out [32]
template <class Fn>
__device__ void three_words(const uint32_t* in, uint32_t* out, Fn&& fn) {
  const uint32_t* mine = in + threadIdx.x * 3;
  out[threadIdx.x] = fn(mine[0], mine[1], mine[2]);
}

__global__ void prmt_kernel(const uint32_t* in, uint32_t* out) {
  three_words(in, out, [](uint32_t a, uint32_t b, uint32_t c) { return prmt(a, b, c); });
}

template <int kTable>
__global__ void lop3_kernel(const uint32_t* in, uint32_t* out) {
  three_words(in, out, [](uint32_t a, uint32_t b, uint32_t c) { return lop3<kTable>(a, b, c); });
}

template <class T>
__global__ void fma2_kernel(const uint32_t* in, uint32_t* out) {
  three_words(in, out, [](uint32_t a, uint32_t b, uint32_t c) { return fma2<T>(a, b, c); });
}

template <class T>
__global__ void sub2_kernel(const uint32_t* in, uint32_t* out) {
  three_words(in, out, [](uint32_t a, uint32_t b, uint32_t) { return sub2<T>(a, b); });
}

template <class T>
__global__ void mul2_kernel(const uint32_t* in, uint32_t* out) {
  three_words(in, out, [](uint32_t a, uint32_t b, uint32_t) { return mul2<T>(a, b); });
}

// in [32], out [32, 5]: xor 5, up 3, down 3, lane 3, each in groups of 8 lanes, and a vote.
__global__ void shuffle_kernel(const uint32_t* in, uint32_t* out) {
  const uint32_t value = in[threadIdx.x];
  uint32_t* mine = out + threadIdx.x * 5;
  mine[0] = __shfl_xor_sync(0xffffffffu, value, 5, 8);
  mine[1] = __shfl_up_sync(0xffffffffu, value, 3, 8);
  mine[2] = __shfl_down_sync(0xffffffffu, value, 3, 8);
  mine[3] = __shfl_sync(0xffffffffu, value, 3, 8);
  mine[4] = __ballot_sync(0xffffffffu, (value & 1) != 0);
}

// in [32, 4], out [32, 4]: odd lanes ask for nothing and get zeros.
__global__ void cp_async_kernel(const uint32_t* in, uint32_t* out) {
  uint32_t* words = reinterpret_cast<uint32_t*>(dynamic_shared()) + threadIdx.x * 4;
  cp_async(words, in + threadIdx.x * 4, threadIdx.x % 2 == 0);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  for (int i = 0; i < 4; ++i) out[threadIdx.x * 4 + i] = words[i];
}

// in [a 64 rows of k, then b], in swizzled rows of 128 bytes, out [128, kColumns / 2]. Four products, so k is 64, or
// 128 of int8: into d that a first one has written, in two groups. Without wgmma nothing is written.
template <class T, int kColumns, bool kRegisters, bool kTransposed>
__global__ void wgmma_kernel(const uint32_t* in, uint32_t* out) {
  if constexpr (kHasWgmma) {
    constexpr int kWords = (64 + kColumns) * 32;
    unsigned char* const shared = dynamic_shared();
    for (int i = threadIdx.x * 4; i < kWords; i += blockDim.x * 4) cp_async(shared + i * 4, in + i);
    cp_async_commit();
    cp_async_wait<0>();
    fence_async_shared();
    __syncthreads();
    const uint64_t a = wgmma_matrix(shared), b = wgmma_matrix(shared + 64 * 128, kTransposed ? 64 * 128 : 0);
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane % 16;
    uint32_t fragments[4][4];
    for (int i = 0; i < 4; ++i) {
      ldmatrix(fragments[i], shared + row * 128 + ((i * 32 + lane / 16 * 16) ^ row % 8 * 16));
    }
    constexpr bool kInt8 = std::is_same_v<T, int8_t>;
    std::conditional_t<kInt8, int32_t, float> d[kColumns / 2];
    for (auto& sum : d) sum = 1;
    wgmma_fence(d, fragments);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint64_t rows = b + i * (kTransposed ? 2048 : 32) / 16;
      if constexpr (kInt8) {
        wgmma_int8<kColumns>(d, fragments[i], rows, i > 0);
      } else if constexpr (kRegisters) {
        wgmma<T, kColumns, kTransposed>(d, fragments[i], rows, i > 0);
      } else {
        wgmma<T, kColumns>(d, a + i * 32 / 16, rows, i > 0);
      }
      if (i % 2 == 1) wgmma_commit();
    }
    wgmma_wait<1>();
    wgmma_wait<0>(d);
    for (int i = 0; i < kColumns / 2; ++i) {
      if constexpr (kInt8) {
        out[threadIdx.x * (kColumns / 2) + i] = static_cast<uint32_t>(d[i]);
      } else {
        out[threadIdx.x * (kColumns / 2) + i] = __float_as_uint(d[i]);
      }
    }
  }
}

using Kernel = void (*)(const uint32_t*, uint32_t*);

// Votes of several warps on the lowest bits of a word: any, all and how many of the block's threads have them.
__global__ void vote_kernel(const uint32_t* in, uint32_t* out) {
  const auto word = static_cast<int>(in[threadIdx.x]);
  out += 9 * threadIdx.x;
  for (int bit = 1; bit < 8; bit *= 2, out += 3) {
    out[0] = __syncthreads_or(word & bit) != 0;
    out[1] = __syncthreads_and(word & bit) != 0;
    out[2] = __syncthreads_count(word & bit);
  }
}

struct Named {
  std::string_view name;
  Kernel kernel;
  unsigned threads = 32;
  unsigned shared_bytes = 512;
};

constexpr Named kKernels[] = {
    {"mma float16", mma_kernel<__half>},
    {"mma bfloat16", mma_kernel<__nv_bfloat16>},
    {"mma float32", mma_tf32_kernel},
    {"mma int8", mma_int8_kernel},
    {"ldmatrix 4", ldmatrix_kernel<4, false>},
    {"ldmatrix 2", ldmatrix_kernel<2, false>},
    {"ldmatrix 4 transposed", ldmatrix_kernel<4, true>},
    {"prmt", prmt_kernel},
    {"lop3 0xea", lop3_kernel<0xea>},
    {"lop3 0x6a", lop3_kernel<0x6a>},
    {"lop3 0x35", lop3_kernel<0x35>},
    {"fma2 float16", fma2_kernel<__half>},
    {"fma2 bfloat16", fma2_kernel<__nv_bfloat16>},
    {"sub2 float16", sub2_kernel<__half>},
    {"sub2 bfloat16", sub2_kernel<__nv_bfloat16>},
    {"mul2 float16", mul2_kernel<__half>},
    {"mul2 bfloat16", mul2_kernel<__nv_bfloat16>},
    {"shuffle", shuffle_kernel},
    {"cp_async", cp_async_kernel},
    {"vote", vote_kernel, 96},
    {"wgmma float16 64", wgmma_kernel<__half, 64, false, false>, 128, 16384},
    {"wgmma bfloat16 128", wgmma_kernel<__nv_bfloat16, 128, false, false>, 128, 24576},
    {"wgmma bfloat16 256", wgmma_kernel<__nv_bfloat16, 256, false, false>, 128, 40960},
    {"wgmma float16 64 registers", wgmma_kernel<__half, 64, true, false>, 128, 16384},
    {"wgmma bfloat16 128 registers transposed", wgmma_kernel<__nv_bfloat16, 128, true, true>, 128, 24576},
    {"wgmma int8 64", wgmma_kernel<int8_t, 64, true, false>, 128, 16384},
    {"wgmma int8 256", wgmma_kernel<int8_t, 256, true, false>, 128, 40960},
    {"wgmma float16 256 registers transposed", wgmma_kernel<__half, 256, true, true>, 128, 40960},
};

}  // namespace
}  // namespace fastinfer::cuda

// Runs the kernel of this name with one block; 0, or 1 if there is none.
extern "C" __attribute__((visibility("default"))) int run_layout(const char* name, const uint32_t* in, uint32_t* out) {
  using namespace fastinfer::cuda;
  for (const auto& [known, kernel, threads, shared_bytes] : kKernels) {
    if (known != name) continue;
    launch(name, kernel, {.grid = 1, .block = threads, .shared_bytes = shared_bytes}, nullptr, in, out);
    return 0;
  }
  return 1;
}
