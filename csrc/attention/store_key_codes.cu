// A warp rotates and rounds one head's key of a token, in shared memory.
#include "attention/store_key_codes.h"

#include <cuda_fp8.h>

#include <cmath>
#include <cstring>

#include "attention/key_codes_cuda.h"
#include "attention/kv_int4.h"
#include "common/cuda/dtype.h"
#include "common/cuda/launch.h"
#include "common/cuda/ptx.h"
#include "common/cuda/vector_io.h"

namespace fastinfer::cuda {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / kWarpSize, kChannels = kKeyCodesPerWord;

// Eight codes of four bits.
struct Int4Codes {};

template <class C>
__device__ void load_key(const StoreCodesParams& p, int64_t row, int channel, float (&key)[kChannels]) {
  if constexpr (std::is_same_v<C, Int4Codes>) {
    const uint32_t codes = static_cast<const uint32_t*>(p.cache)[(row * p.head_dim + channel) / kChannels];
    const int64_t group = row * int4_groups(p.head_dim, kInt4KeyGroup) + channel / kInt4KeyGroup;
    __half2 pair;
    memcpy(&pair, static_cast<const uint32_t*>(p.scale) + group, sizeof pair);
    for (int i = 0; i < kChannels; ++i) {
      key[i] = fmaf(__low2float(pair), static_cast<float>(codes >> (4 * i) & 15u), __high2float(pair));
    }
  } else {
    constexpr bool kScaled = sizeof(C) == 1;
    constexpr int kVector = sizeof(C) == 4 ? 4 : kChannels;  // 16 bytes at most
    const float scale = kScaled ? static_cast<const float*>(p.scale)[row] : 1.0f;
    const C* const from = static_cast<const C*>(p.cache) + row * p.head_dim + channel;
    for (int first = 0; first < kChannels; first += kVector) {
      const auto v = load_vector<kVector>(from + first);
      for (int i = 0; i < kVector; ++i) key[first + i] = static_cast<float>(v.values[i]) * scale;
    }
  }
}

template <class C>
__global__ void __launch_bounds__(kThreads) store_key_codes_kernel(StoreCodesParams p) {
  grid_dependency_wait();
  grid_dependency_launch();
  const int64_t slot = p.slot_mapping[blockIdx.x];
  const int lane = static_cast<int>(threadIdx.x % kWarpSize), warp = static_cast<int>(threadIdx.x / kWarpSize);
  const int head = static_cast<int>(blockIdx.y) * kWarps + warp;
  // The host cannot check a slot without waiting for the device.
  if (slot < 0 || slot >= p.slots || head >= p.heads) return;
  float* const row = reinterpret_cast<float*>(dynamic_shared()) + warp * p.head_dim;
  for (int first = lane * kChannels; first < p.head_dim; first += kWarpSize * kChannels) {
    float key[kChannels];
    load_key<C>(p, slot * p.heads + head, first, key);
    for (int i = 0; i < kChannels; ++i) row[first + i] = key[i];
  }
  rotate_by_warp(row, p.head_dim);
  const RowScale level = row_scale<KeyLevel>(largest_of_row(row, p.head_dim));
  uint32_t* const out = p.codes + (slot / p.block_size * p.heads + head) * key_code_words(p.head_dim) * p.block_size +
                        slot % p.block_size;
  const int words = p.head_dim / kChannels;
  for (int word = lane; word < words; word += kWarpSize) {
    uint32_t codes = 0;
    for (int i = 0; i < kChannels; ++i) {
      const auto code = static_cast<uint32_t>(level.apply(row[word * kChannels + i]) + (kLargestKeyLevel + 0.5f));
      codes |= code << (i % 4 * 8 + i / 4 * 4);
    }
    out[word * p.block_size] = codes;
  }
  if (lane == 0) out[words * p.block_size] = __float_as_uint(level.scale);
}

}  // namespace

void store_key_codes(const StoreCodesParams& p, void* stream) {
  const LaunchConfig config{.grid = p.tokens,
                            .block = kThreads,
                            .shared_bytes = sizeof(float) * kWarps * p.head_dim,
                            .grid_y = static_cast<unsigned>((p.heads + kWarps - 1) / kWarps),
                            .dependent = true};
  const auto run = [&]<class C>(C) { launch("store_key_codes", store_key_codes_kernel<C>, config, stream, p); };
  switch (p.quantization) {
    case CacheQuantization::kInt8: return run(int8_t{});
    case CacheQuantization::kFp8: return run(__nv_fp8_e4m3{});
    case CacheQuantization::kInt4: return run(Int4Codes{});
    default: dispatch_cuda(p.cache_dtype, run);
  }
}

}  // namespace fastinfer::cuda
