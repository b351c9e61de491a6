// A group of lanes stores one head of one token into the cache, shared by the store and the fused prologue of decode.
#pragma once

#include <cuda_fp8.h>

#include "attention/kv_cache_slots.h"
#include "attention/kv_int4_cuda.h"
#include "common/cuda/quantize_row.h"
#include "common/cuda/vector_io.h"

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

// Neighbouring lanes have a part each of a group of `elements`; the warp's other heads may have other groups. A lane
// has whole bytes, so that a group of 64 never exceeds what the lanes have at once.
template <int kCount, class X>
__device__ void quantize_int4_head(const LaneGroup& group, const X* x, int count, unsigned char* out, uint32_t* scales,
                                   int elements) {
  constexpr int kOwn = kCount > 1 ? kCount : 2;
  for (int begin = 0; begin < count; begin += group.lanes * kOwn) {
    const int i = begin + group.rank * kOwn;
    float values[kOwn] = {}, lowest = INFINITY, largest = -INFINITY;
    for (int j = 0; j < kOwn && i < count; ++j) {
      if (j % kCount == 0) {
        const auto v = load_vector<kCount>(x + i + j);
        for (int k = 0; k < kCount; ++k) values[j + k] = to_float(v.values[k]);
      }
      const float finite = fabsf(values[j]) <= FLT_MAX ? values[j] : -INFINITY;
      lowest = fminf(lowest, finite), largest = fmaxf(largest, finite);
    }
    for (int offset = group.lanes / 2; offset > 0; offset /= 2) {
      const float low = __shfl_xor_sync(kFullMask, lowest, offset), high = __shfl_xor_sync(kFullMask, largest, offset);
      if (offset * kOwn < elements) lowest = fminf(lowest, low), largest = fmaxf(largest, high);
    }
    const Int4Rounding rounding(lowest, largest);
    uint32_t codes = 0;
    for (int j = 0; j < kOwn; ++j) codes |= rounding.code(values[j]) << (4 * j);
    if (i >= count || out == nullptr) continue;
    if (i % elements == 0) scales[i / elements] = rounding.scale;
    using Codes = std::conditional_t<kOwn == 8, uint32_t, std::conditional_t<kOwn == 4, uint16_t, uint8_t>>;
    *reinterpret_cast<Codes*>(out + i / 2) = static_cast<Codes>(codes);
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
                           int64_t slot, int head, int int4_group) {
  const int64_t row = (slot < 0 ? 0 : slot) * cache.heads + head, at = row * cache.head_dim;
  if (cache.quantization == CacheQuantization::kInt4) {
    auto* const out = static_cast<unsigned char*>(to) + at / 2;
    return quantize_int4_head<kCount>(group, x, cache.head_dim, slot < 0 ? nullptr : out,
                                      static_cast<uint32_t*>(scales) + row * int4_groups(cache.head_dim, int4_group),
                                      int4_group);
  }
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
