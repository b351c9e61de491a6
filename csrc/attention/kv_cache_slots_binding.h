// Checks of the cache that a binding stores into.
#pragma once

#include "attention/kv_cache_binding.h"
#include "attention/kv_cache_slots.h"
#include "binding/launch.h"

namespace fastinfer {

inline KvCacheSlots kv_cache_slots(const Checks& check, const Tensor& k_cache, const Tensor& v_cache,
                                   const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale,
                                   const Tensor& slot_mapping, int64_t tokens, int64_t heads, int64_t head_dim) {
  const int64_t columns = cache_columns(check, k_cache, "k", head_dim);
  check.shape(k_cache, "k_cache", {kAny, kAny, heads, columns});
  check.shape(v_cache, "v_cache", {k_cache.size(0), k_cache.size(1), heads, columns});
  check.contiguous(k_cache, "k_cache");
  check.contiguous(v_cache, "v_cache");
  check.dtype(v_cache, "v_cache", k_cache.scalar_type());
  const CacheQuantization quantization = cache_quantization(k_cache);
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
      .k_scale = cache_scales(check, k_scale, "k_scale", k_cache, head_dim, kInt4KeyGroup),
      .v_scale = cache_scales(check, v_scale, "v_scale", v_cache, head_dim, kInt4ValueGroup),
      .slot_mapping = slot,
      .slots = slots,
      .heads = static_cast<int>(heads),
      .head_dim = static_cast<int>(head_dim),
      .quantization = quantization,
      .dtype = quantized ? DType::kFloat32 : check.float_dtype(k_cache, "k_cache"),
  };
}

}  // namespace fastinfer
