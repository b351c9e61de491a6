// What the bindings of store_key_codes and store_value_codes share.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>

#include "attention/kv_cache_binding.h"
#include "attention/store_key_codes.h"

namespace fastinfer {

// Checks the arguments but for the slots. `cache_name` and `scale_name` are the schema's; an int4 cache has a scale for
// each int4_group elements.
inline StoreCodesParams store_codes_params(const Checks& check, const Tensor& codes, const Tensor& cache,
                                           const char* cache_name, const std::optional<Tensor>& scale,
                                           const char* scale_name, const Tensor& slot_mapping, int int4_group) {
  const int64_t blocks = codes.size(0), heads = codes.size(1), block_size = codes.size(3);
  const int64_t head_dim = (codes.size(2) - 1) * kKeyCodesPerWord, tokens = slot_mapping.numel();
  check.shape(cache, cache_name, {blocks, block_size, heads, cache_columns(check, cache, "codes", head_dim)});
  check.shape(slot_mapping, "slot_mapping", {tokens});
  check.dtype(slot_mapping, "slot_mapping", ScalarType::Long);
  check.dtype(codes, "codes", ScalarType::Int);
  for (const auto& [t, name] : {std::pair{&cache, cache_name}, {&slot_mapping, "slot_mapping"}, {&codes, "codes"}}) {
    check.contiguous(*t, name);
  }
  const CacheQuantization quantization = cache_quantization(cache);
  return {
      .cache = cache.data_ptr(),
      .scale = cache_scales(check, scale, scale_name, cache, head_dim, int4_group),
      .slot_mapping = static_cast<const int64_t*>(slot_mapping.data_ptr()),
      .codes = static_cast<uint32_t*>(codes.data_ptr()),
      .tokens = tokens,
      .slots = blocks * block_size,
      .block_size = static_cast<int>(block_size),
      .heads = static_cast<int>(heads),
      .head_dim = static_cast<int>(head_dim),
      .quantization = quantization,
      .cache_dtype = quantization != CacheQuantization::kNone ? DType::kFloat32 : check.float_dtype(cache, cache_name),
  };
}

// Slots are in host memory.
inline void check_slots(const Checks& check, const StoreCodesParams& p) {
  for (int64_t i = 0; i < p.tokens; ++i) {
    check.require(p.slot_mapping[i] >= -1 && p.slot_mapping[i] < p.slots, "slot_mapping[", i, "] must be in -1..",
                  p.slots - 1, ", got ", p.slot_mapping[i]);
  }
}

}  // namespace fastinfer
