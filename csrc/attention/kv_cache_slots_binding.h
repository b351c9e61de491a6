// Checks of the cache that a binding stores into.
#pragma once

#include "attention/kv_cache_slots.h"
#include "common/binding.h"
#include "common/device.h"

namespace fastinfer {

inline float* slot_scales(const Checks& check, const std::optional<Tensor>& scale, const char* name,
                          const Tensor& cache, bool quantized) {
  check.require(scale.has_value() == quantized, name,
                " must be given for a cache of int8 or float8_e4m3fn and for no other, got ", scale ? "one" : "none");
  if (!scale) return nullptr;
  check.shape(*scale, name, {cache.size(0), cache.size(1), cache.size(2)});
  check.dtype(*scale, name, ScalarType::Float);
  check.contiguous(*scale, name);
  return static_cast<float*>(scale->data_ptr());
}

inline KvCacheSlots kv_cache_slots(const Checks& check, const Tensor& k_cache, const Tensor& v_cache,
                                   const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale,
                                   const Tensor& slot_mapping, int64_t tokens, int64_t heads, int64_t head_dim) {
  check.shape(k_cache, "k_cache", {kAny, kAny, heads, head_dim});
  check.shape(v_cache, "v_cache", {k_cache.size(0), k_cache.size(1), heads, head_dim});
  check.contiguous(k_cache, "k_cache");
  check.contiguous(v_cache, "v_cache");
  const ScalarType type = k_cache.scalar_type();
  check.dtype(v_cache, "v_cache", type);
  CacheQuantization quantization = CacheQuantization::kNone;
  if (type == ScalarType::Char) quantization = CacheQuantization::kInt8;
  if (type == ScalarType::Float8_e4m3fn) quantization = CacheQuantization::kFp8;
  const bool quantized = quantization != CacheQuantization::kNone;
  check.shape(slot_mapping, "slot_mapping", {tokens});
  check.dtype(slot_mapping, "slot_mapping", ScalarType::Long);
  check.contiguous(slot_mapping, "slot_mapping");
  const int64_t slots = k_cache.size(0) * k_cache.size(1);
  const auto* slot = static_cast<const int64_t*>(slot_mapping.data_ptr());
  for (int64_t i = 0; gpu_of(slot_mapping) == nullptr && i < tokens; ++i) {
    check.require(slot[i] >= -1 && slot[i] < slots, "slot_mapping[", i, "] must be in -1..", slots - 1, ", got ",
                  slot[i]);
  }
  return {
      .k = k_cache.data_ptr(),
      .v = v_cache.data_ptr(),
      .k_scale = slot_scales(check, k_scale, "k_scale", k_cache, quantized),
      .v_scale = slot_scales(check, v_scale, "v_scale", v_cache, quantized),
      .slot_mapping = slot,
      .slots = slots,
      .heads = static_cast<int>(heads),
      .head_dim = static_cast<int>(head_dim),
      .quantization = quantization,
      .dtype = quantized ? DType::kFloat32 : check.float_dtype(k_cache, "k_cache"),
  };
}

}  // namespace fastinfer
