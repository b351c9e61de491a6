#include "attention/store_kv_cache.h"

#include "attention/kv_cache_slots_binding.h"

namespace fastinfer {
namespace {

void store_kv_cache(const Tensor& k, const Tensor& v, const Tensor& k_cache, const Tensor& v_cache,
                    const Tensor& slot_mapping, std::optional<Tensor> k_scale, std::optional<Tensor> v_scale) {
  const Checks check("store_kv_cache", k);
  check.shape(k, "k", {kAny, kAny, kAny});
  const int64_t tokens = k.size(0), heads = k.size(1), head_dim = k.size(2);
  check.shape(v, "v", {tokens, heads, head_dim});
  const DType dtype = check.float_dtype(k, "k");
  check.dtype(v, "v", k.scalar_type());
  check.rows_contiguous(k, "k");
  check.rows_contiguous(v, "v");
  const StoreKvCacheParams params{
      .k = k.data_ptr(),
      .v = v.data_ptr(),
      .tokens = tokens,
      .k_stride = k.stride(0),
      .v_stride = v.stride(0),
      .dtype = dtype,
      .cache = kv_cache_slots(check, k_cache, v_cache, k_scale, v_scale, slot_mapping, tokens, heads, head_dim),
  };
  FASTINFER_LAUNCH(k, store_kv_cache, params);
}

}  // namespace

FASTINFER_OPERATORS(m) {
  m.impl("store_kv_cache", TORCH_BOX(&store_kv_cache));
}

}  // namespace fastinfer
