#include "rotary/latent_rotary_store.h"

#include "attention/kv_cache_slots_binding.h"
#include "rotary/rotary_binding.h"

namespace fastinfer {
namespace {

Tensor latent_rotary_store(const Tensor& q_latent, const Tensor& q_rope, const Tensor& kv, const Tensor& norm_weight,
                           double eps, const Tensor& positions, const Tensor& cos_sin_cache, bool interleaved,
                           std::optional<Tensor> query_scales, const Tensor& cache, std::optional<Tensor> scale,
                           const Tensor& slot_mapping) {
  const Checks check("latent_rotary_store", q_latent);
  check.shape(q_latent, "q_latent", {kAny, kAny, kAny});
  const int64_t tokens = q_latent.size(0), heads = q_latent.size(1), rank = q_latent.size(2);
  check.shape(q_rope, "q_rope", {tokens, heads, kAny});
  const int64_t rotary_dim = q_rope.size(2), row = rank + rotary_dim;
  check.shape(kv, "kv", {tokens, row});
  check.shape(norm_weight, "norm_weight", {rank});
  check.require(rank > 0 && heads > 0, "q_latent must have heads and columns, got ", format_shape(q_latent.sizes()));
  const DType dtype = check.float_dtype(q_latent, "q_latent");
  check.dtype(q_rope, "q_rope", q_latent.scalar_type());
  check.dtype(kv, "kv", q_latent.scalar_type());
  check.contiguous(q_latent, "q_latent");
  check.require(rotary_dim <= 1 || q_rope.stride(2) == 1,
                "q_rope must be contiguous in its last dimension, got strides ", format_shape(q_rope.strides()));
  check.rows_contiguous(kv, "kv");
  check.contiguous(norm_weight, "norm_weight");
  check_rotary(check, positions, cos_sin_cache, tokens, rotary_dim);
  check.shape(cos_sin_cache, "cos_sin_cache", {kAny, rotary_dim});
  check.require(cache_quantization(cache) != CacheQuantization::kInt4,
                "cache must not be uint8 (int4), whose keys and values have other groups");
  check.shape(cache, "cache", {kAny, kAny, 1, row});
  check.contiguous(cache, "cache");
  if (cache_quantization(cache) == CacheQuantization::kNone) check.float_dtype(cache, "cache");
  cache_scales(check, scale, "scale", cache, row, kInt4KeyGroup);
  const Tensor out = new_tensor(q_latent, {tokens, heads, row});
  const LatentRotaryStoreParams params{
      .q_latent = q_latent.data_ptr(),
      .q_rope = q_rope.data_ptr(),
      .kv = kv.data_ptr(),
      .norm_weight = norm_weight.data_ptr(),
      .positions = static_cast<const int64_t*>(positions.data_ptr()),
      .cos_sin_cache = static_cast<const float*>(cos_sin_cache.data_ptr()),
      .query_scales = checked_query_scales(check, query_scales, cos_sin_cache),
      .out = out.data_ptr(),
      .tokens = tokens,
      .q_rope_stride = q_rope.stride(0),
      .q_rope_head_stride = q_rope.stride(1),
      .kv_stride = kv.stride(0),
      .max_position = cos_sin_cache.size(0),
      .heads = static_cast<int>(heads),
      .rank = static_cast<int>(rank),
      .rotary_dim = static_cast<int>(rotary_dim),
      .eps = static_cast<float>(eps),
      .interleaved = interleaved,
      .dtype = dtype,
      .weight_dtype = check.fp32_or(dtype, norm_weight, "norm_weight"),
      .cache = kv_cache_slots(check, cache, cache, scale, scale, slot_mapping, tokens, 1, row),
  };
  FASTINFER_LAUNCH(q_latent, latent_rotary_store, params);
  return out;
}

}  // namespace

FASTINFER_OPERATORS(m) {
  m.impl("latent_rotary_store", TORCH_BOX(&latent_rotary_store));
}

}  // namespace fastinfer
