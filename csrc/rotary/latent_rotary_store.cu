// The prologue of latent attention on the GPU: a warp joins and rotates one head's query, and one warp of a token has
// the row of the cache.
#include "rotary/latent_rotary_store.h"

#include "attention/store_kv_cache_cuda.h"
#include "common/cuda/launch.h"
#include "common/cuda/ptx.h"

namespace fastinfer::cuda {
namespace {

constexpr int kWarps = 4;

// Rotates the pairs of a part of a row, lanes of a warp by turns. load(i) and store(i, x) have its elements.
template <class Load, class Store>
__device__ void rotate(const LatentRotaryStoreParams& p, int64_t position, const Load& load, const Store& store) {
  const int half = p.rotary_dim / 2;
  const bool known =
      position >= 0 && position < p.max_position;  // the host cannot check without waiting for the device
  const float* const cos = p.cos_sin_cache + (known ? position : 0) * p.rotary_dim;
  for (int i = threadIdx.x % kWarpSize; i < half; i += kWarpSize) {
    const int first = p.interleaved ? 2 * i : i, second = p.interleaved ? 2 * i + 1 : i + half;
    const float a = load(first), b = load(second);
    const float c = known ? cos[i] : 1.0f, s = known ? cos[half + i] : 0.0f;
    store(first, a * c - b * s);
    store(second, b * c + a * s);
  }
}

template <class T, int kCount>
__device__ void join_query(const LatentRotaryStoreParams& p, int64_t token, int head) {
  const T* const latent = static_cast<const T*>(p.q_latent) + (token * p.heads + head) * p.rank;
  const T* const rope = static_cast<const T*>(p.q_rope) + token * p.q_rope_stride + head * p.q_rope_head_stride;
  T* const out = static_cast<T*>(p.out) + (token * p.heads + head) * (p.rank + p.rotary_dim);
  const int64_t position = p.positions[token];
  const bool scaled = p.query_scales != nullptr && position >= 0 && position < p.max_position;
  const float scale = scaled ? p.query_scales[position] : 1.0f;
  for (int i = threadIdx.x % kWarpSize * kCount; i < p.rank; i += kWarpSize * kCount) {
    float values[kCount];
    load_floats(latent + i, values);
    for (int j = 0; j < kCount; ++j) values[j] *= scale;
    store_values(out + i, values);
  }
  rotate(
      p, position, [&](int i) { return to_float(rope[i]); },
      [&](int i, float x) { out[p.rank + i] = from_float<T>(x * scale); });
}

template <class T, int kCount>
__device__ void store_row(const LatentRotaryStoreParams& p, int64_t token, float* prepared) {
  const LaneGroup warp(kWarpSize);
  const T* const kv = static_cast<const T*>(p.kv) + token * p.kv_stride;
  float squares = 0.0f;
  for (int i = warp.rank * kCount; i < p.rank; i += kWarpSize * kCount) {
    float values[kCount];
    load_floats(kv + i, values);
    for (int j = 0; j < kCount; ++j) squares += values[j] * values[j];
  }
  const float scale = rsqrtf(warp.sum(squares) / static_cast<float>(p.rank) + p.eps);
  for (int i = warp.rank * kCount; i < p.rank; i += kWarpSize * kCount) {
    float values[kCount], weights[kCount];
    load_floats(kv + i, values);
    if (p.weight_dtype == DType::kFloat32) {
      load_floats(static_cast<const float*>(p.norm_weight) + i, weights);
    } else {
      load_floats(static_cast<const T*>(p.norm_weight) + i, weights);
    }
    for (int j = 0; j < kCount; ++j) values[j] *= scale * weights[j];
    store_values(prepared + i, values);
  }
  rotate(
      p, p.positions[token], [&](int i) { return to_float(kv[p.rank + i]); },
      [&](int i, float x) { prepared[p.rank + i] = x; });
  __syncwarp();
  store_head<kCount>(warp, p.cache, prepared, p.cache.k, p.cache.k_scale, slot_of(p.cache, token), 0, kInt4KeyGroup);
}

template <class T, int kCount>
__global__ void latent_rotary_store_kernel(LatentRotaryStoreParams p) {
  grid_dependency_wait();
  grid_dependency_launch();
  const int index = static_cast<int>(blockIdx.y * kWarps + threadIdx.x / kWarpSize);
  if (index < p.heads) {
    join_query<T, kCount>(p, blockIdx.x, index);
  } else if (index == p.heads) {
    store_row<T, kCount>(p, blockIdx.x, reinterpret_cast<float*>(dynamic_shared()));
  }
}

}  // namespace

void latent_rotary_store(const LatentRotaryStoreParams& p, void* stream) {
  dispatch_cuda(p.dtype, [&]<class T>(T) {
    constexpr int kVector = kVectorElements<T>;
    const bool vectorised = p.rank % kVector == 0 && p.rotary_dim % kVector == 0 && p.kv_stride % kVector == 0 &&
                            vector_aligned(p.q_latent, p.kv, p.norm_weight, p.out, p.cache.k);
    const LaunchConfig config{.grid = p.tokens,
                              .block = kWarps * kWarpSize,
                              .shared_bytes = (p.rank + p.rotary_dim) * sizeof(float),
                              .grid_y = static_cast<unsigned>(p.heads / kWarps + 1),
                              .dependent = true};
    const auto kernel = vectorised ? latent_rotary_store_kernel<T, kVector> : latent_rotary_store_kernel<T, 1>;
    launch("latent_rotary_store", kernel, config, stream, p);
  });
}

}  // namespace fastinfer::cuda
