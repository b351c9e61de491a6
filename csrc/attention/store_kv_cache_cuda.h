// A group of lanes stores one head of one token into the cache, shared by the store and the fused prologue of decode.
#pragma once

#include <cuda_fp8.h>

#include "attention/kv_cache_slots.h"
#include "common/cuda/vector_io.h"
#include "fused/quantize_row_cuda.h"

namespace fastinfer::cuda {

// A power of two of neighbouring lanes; `rank` is the thread's place among them.
struct LaneGroup {
  int lanes;
  int rank;

  __device__ explicit LaneGroup(int lanes_) : lanes(lanes_), rank(threadIdx.x % lanes_) {}

  __device__ float sum(float value) const {
    for (int offset = lanes / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(kFullMask, value, offset);
    return value;
  }

  __device__ uint32_t max(uint32_t value) const {
    for (int offset = lanes / 2; offset > 0; offset /= 2) {
      value = ::max(value, __shfl_xor_sync(kFullMask, value, offset));
    }
    return value;
  }
};

template <int kCount, class Q, class X>
__device__ void quantize_head(const LaneGroup& group, const X* x, int count, Q* out, float* scale) {
  uint32_t largest = 0;
  for (int i = group.rank * kCount; i < count; i += group.lanes * kCount) {
    const auto v = load_vector<kCount>(x + i);
    for (int j = 0; j < kCount; ++j) largest = ::max(largest, magnitude_bits(to_float(v.values[j])));
  }
  const RowScale row = row_scale<Q>(group.max(largest));
  if (out == nullptr) return;
  if (group.rank == 0) *scale = row.scale;
  for (int i = group.rank * kCount; i < count; i += group.lanes * kCount) {
    const auto v = load_vector<kCount>(x + i);
    float values[kCount];
    for (int j = 0; j < kCount; ++j) values[j] = row.apply(to_float(v.values[j]));
    store_values(out + i, values);
  }
}

template <int kCount, class C, class X>
__device__ void convert_head(const LaneGroup& group, const X* x, int count, C* out) {
  for (int i = group.rank * kCount; i < count; i += group.lanes * kCount) {
    const auto v = load_vector<kCount>(x + i);
    float values[kCount];
    for (int j = 0; j < kCount; ++j) values[j] = to_float(v.values[j]);
    store_values(out + i, values);
  }
}

// All lanes of the warp must call it, with slot < 0 where nothing is to be stored.
template <int kCount, class X>
__device__ void store_head(const LaneGroup& group, const KvCacheSlots& cache, const X* x, void* to, void* scales,
                           int64_t slot, int head) {
  const int64_t row = (slot < 0 ? 0 : slot) * cache.heads + head, at = row * cache.head_dim;
  auto* const scale = static_cast<float*>(scales) + row;
  if (cache.quantization == CacheQuantization::kInt8) {
    auto* const out = static_cast<int8_t*>(to) + at;
    return quantize_head<kCount>(group, x, cache.head_dim, slot < 0 ? nullptr : out, scale);
  }
  if (cache.quantization == CacheQuantization::kFp8) {
    auto* const out = static_cast<__nv_fp8_e4m3*>(to) + at;
    return quantize_head<kCount>(group, x, cache.head_dim, slot < 0 ? nullptr : out, scale);
  }
  if (slot < 0) return;
  switch (cache.dtype) {
    case DType::kBFloat16: return convert_head<kCount>(group, x, cache.head_dim, static_cast<__nv_bfloat16*>(to) + at);
    case DType::kFloat16: return convert_head<kCount>(group, x, cache.head_dim, static_cast<__half*>(to) + at);
    default: return convert_head<kCount>(group, x, cache.head_dim, static_cast<float*>(to) + at);
  }
}

// The token's slot, or -1: the host cannot check without waiting for the device.
__device__ inline int64_t slot_of(const KvCacheSlots& cache, int64_t token) {
  const int64_t slot = cache.slot_mapping[token];
  return slot < cache.slots ? slot : -1;
}

}  // namespace fastinfer::cuda
