// Checks of a cache's elements and scales, for the operators that store into it and for the one that reads it.
#pragma once

#include "attention/kv_int4.h"
#include "attention/paged_attention.h"
#include "binding/checks.h"

namespace fastinfer {

inline CacheQuantization cache_quantization(const Tensor& cache) {
  switch (cache.scalar_type()) {
    case ScalarType::Char: return CacheQuantization::kInt8;
    case ScalarType::Float8_e4m3fn: return CacheQuantization::kFp8;
    case ScalarType::Byte: return CacheQuantization::kInt4;
    default: return CacheQuantization::kNone;
  }
}

// Elements of a row of the cache's tensor; `x` has the head_dim.
inline int64_t cache_columns(const Checks& check, const Tensor& cache, const char* x, int64_t head_dim) {
  if (cache_quantization(cache) != CacheQuantization::kInt4) return head_dim;
  check.require(head_dim % 2 == 0, x, " must have an even head_dim for a cache of uint8 (int4), got ", head_dim);
  return head_dim / 2;
}

inline void* cache_scales(const Checks& check, const std::optional<Tensor>& scale, const char* name,
                          const Tensor& cache, int64_t head_dim, int int4_group) {
  const CacheQuantization quantization = cache_quantization(cache);
  check.require(scale.has_value() == (quantization != CacheQuantization::kNone), name,
                " must be given for a cache of int8, float8_e4m3fn or uint8 (int4) and for no other, got ",
                scale ? "one" : "none");
  if (!scale) return nullptr;
  const auto pages = cache.sizes();
  if (quantization == CacheQuantization::kInt4) {
    check.shape(*scale, name, {pages[0], pages[1], pages[2], int4_groups(static_cast<int>(head_dim), int4_group), 2});
    check.dtype(*scale, name, ScalarType::Half);
    // Kernels read a group's scale and minimum at once.
    check.require(reinterpret_cast<uintptr_t>(scale->data_ptr()) % 4 == 0, name, " must be aligned to 4 bytes");
  } else {
    check.shape(*scale, name, {pages[0], pages[1], pages[2]});
    check.dtype(*scale, name, ScalarType::Float);
  }
  check.contiguous(*scale, name);
  return scale->data_ptr();
}

}  // namespace fastinfer
