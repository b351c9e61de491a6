// A thread has eight channels of a head in the page whose last slot a token has, and goes through the page's keys.
#include "attention/store_page_bounds.h"

#include <cuda_fp8.h>

#include <cmath>
#include <cstring>

#include "attention/kv_int4.h"
#include "common/cuda/dtype.h"
#include "common/cuda/launch.h"
#include "common/cuda/ptx.h"
#include "common/cuda/vector_io.h"

namespace fastinfer::cuda {
namespace {

constexpr int kThreads = 128, kChannels = 8;

// Eight codes of four bits.
struct Int4Codes {};

template <class C>
__device__ void load_key(const StorePageBoundsParams& p, int64_t row, int channel, float (&key)[kChannels]) {
  if constexpr (std::is_same_v<C, Int4Codes>) {
    const uint32_t codes = static_cast<const uint32_t*>(p.k_cache)[(row * p.head_dim + channel) / kChannels];
    const int64_t group = row * int4_groups(p.head_dim, kInt4KeyGroup) + channel / kInt4KeyGroup;
    __half2 pair;
    memcpy(&pair, static_cast<const uint32_t*>(p.k_scale) + group, sizeof pair);
    for (int i = 0; i < kChannels; ++i) {
      key[i] = fmaf(__low2float(pair), static_cast<float>(codes >> (4 * i) & 15u), __high2float(pair));
    }
  } else {
    constexpr bool kScaled = sizeof(C) == 1;
    constexpr int kVector = sizeof(C) == 4 ? 4 : kChannels;  // 16 bytes at most
    const float scale = kScaled ? static_cast<const float*>(p.k_scale)[row] : 1.0f;
    const C* const from = static_cast<const C*>(p.k_cache) + row * p.head_dim + channel;
    for (int first = 0; first < kChannels; first += kVector) {
      const auto v = load_vector<kVector>(from + first);
      for (int i = 0; i < kVector; ++i) key[first + i] = static_cast<float>(v.values[i]) * scale;
    }
  }
}

// v where `away` is false or v has no more bits than bf16, else the next number of bf16 that is farther from zero.
__device__ inline __nv_bfloat16 round_away(float v, bool away) {
  const uint32_t bits = __float_as_uint(v), more = away && (bits & 0xffffu) != 0 ? 0x10000u : 0u;
  return __float2bfloat16_rn(v == v ? __uint_as_float((bits & 0xffff0000u) + more) : v);
}

template <class C>
__global__ void __launch_bounds__(kThreads) store_page_bounds_kernel(StorePageBoundsParams p) {
  grid_dependency_wait();
  grid_dependency_launch();
  const int64_t slot = p.slot_mapping[blockIdx.x];
  const int first = static_cast<int>(blockIdx.y * kThreads + threadIdx.x) * kChannels;  // of all heads' channels
  // The host cannot check a slot without waiting for the device.
  if (slot < 0 || slot >= p.slots || (slot + 1) % p.block_size != 0 || first >= p.heads * p.head_dim) return;
  const int64_t page = slot / p.block_size;
  const int head = first / p.head_dim, channel = first % p.head_dim;
  float least[kChannels], largest[kChannels];
  for (int i = 0; i < kChannels; ++i) least[i] = INFINITY, largest[i] = -INFINITY;
#pragma unroll 4
  for (int j = 0; j < p.block_size; ++j) {
    float key[kChannels];
    load_key<C>(p, (page * p.block_size + j) * p.heads + head, channel, key);
    for (int i = 0; i < kChannels; ++i) {
      // A NaN stays: no comparison with it is true.
      least[i] = least[i] <= key[i] || least[i] != least[i] ? least[i] : key[i];
      largest[i] = largest[i] >= key[i] || largest[i] != largest[i] ? largest[i] : key[i];
    }
  }
  Vector<__nv_bfloat16, kChannels> low, high;
  for (int i = 0; i < kChannels; ++i) {
    low.values[i] = round_away(least[i], least[i] < 0.0f);
    high.values[i] = round_away(largest[i], largest[i] > 0.0f);
  }
  auto* const out = reinterpret_cast<__nv_bfloat16*>(p.bounds) + (page * p.heads + head) * 2 * p.head_dim + channel;
  store_vector(out, low);
  store_vector(out + p.head_dim, high);
}

}  // namespace

void store_page_bounds(const StorePageBoundsParams& p, void* stream) {
  const int columns = p.heads * p.head_dim / kChannels;
  const LaunchConfig config{.grid = p.tokens,
                            .block = kThreads,
                            .grid_y = static_cast<unsigned>((columns + kThreads - 1) / kThreads),
                            .dependent = true};
  const auto run = [&]<class C>(C) {
    launch("store_page_bounds", store_page_bounds_kernel<C>, config, stream, p);
  };
  switch (p.quantization) {
    case CacheQuantization::kInt8: return run(int8_t{});
    case CacheQuantization::kFp8: return run(__nv_fp8_e4m3{});
    case CacheQuantization::kInt4: return run(Int4Codes{});
    default: dispatch_cuda(p.cache_dtype, run);
  }
}

}  // namespace fastinfer::cuda
